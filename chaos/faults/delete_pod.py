"""The pod of a node is deleted."""

from chaos.faults import Kind
from chaos.scene import Parameters
from chaos.unavailable import heal, inject, witness

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "node"


def available() -> str | None:
    return "needs a Kubernetes cluster; kill_node is what it does to the processes"
