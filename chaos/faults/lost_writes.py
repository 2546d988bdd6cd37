"""What was written and not synced is lost, as in a power cut."""

from chaos.faults import Kind
from chaos.scene import Parameters
from chaos.unavailable import heal, inject, witness

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def available() -> str | None:
    return "needs a block device that can drop writes; tests/unit/test_power_cut.py does so to the store's own code"
