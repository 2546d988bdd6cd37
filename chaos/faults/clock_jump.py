"""The clock of a process jumps."""

from chaos.faults import Kind
from chaos.scene import Parameters
from chaos.unavailable import heal, inject, witness

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


def available() -> str | None:
    return (
        "the clock of one process is moved by libfaketime alone, which is not installed with the harness; moving the "
        "machine's would hit everything on it"
    )
