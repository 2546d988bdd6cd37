"""The catalogue: each module in this package is a fault, named by its file. Nothing is registered."""

import importlib
import pkgutil
from typing import Protocol, cast

from chaos.directory import Fired
from checkpointing.errors import ConfigError


class Fault(Protocol):
    """What the module of a fault defines."""

    def available(self) -> str | None:
        """None where it can be done here, else why not."""

    def inject(self, pid: int) -> None:
        """Do it to the process `pid`, which may be the caller's own."""

    def witness(self, fired: Fired) -> str | None:
        """Evidence, seen from outside the target, that it happened; None while there is none."""


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Fault:
    """Raises ConfigError where there is no such fault, or where it can't be done here."""
    if name not in names():
        raise ConfigError(f"there is no fault {name!r}; there are: {', '.join(names())}")
    fault = cast(Fault, importlib.import_module(f"{__name__}.{name}"))
    if reason := fault.available():
        raise ConfigError(f"the fault {name!r} can't be done here: {reason}")
    return fault
