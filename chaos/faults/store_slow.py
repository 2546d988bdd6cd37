"""The file system of a tier is slow."""

from chaos.faults import Kind
from chaos.scene import Parameters
from chaos.unavailable import heal, inject, witness

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def available() -> str | None:
    return "needs a device that delays, or FSx itself; s3_slow delays an object store"
