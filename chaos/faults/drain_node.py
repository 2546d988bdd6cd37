"""The node is drained, with notice."""

from chaos.faults import Kind
from chaos.scene import Parameters
from chaos.unavailable import heal, inject, witness

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "node"


def available() -> str | None:
    return "needs a cluster manager that drains nodes; terminate_group is what it does to the processes"
