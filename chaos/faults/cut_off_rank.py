"""A rank is cut off from its peers, and they from it."""

from chaos.faults import Kind
from chaos.scene import Parameters
from chaos.unavailable import heal, inject, witness

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


def available() -> str | None:
    return "needs a network namespace for each node, so a real cluster; stop is what its peers see of it"
