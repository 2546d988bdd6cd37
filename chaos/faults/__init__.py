"""The catalogue: each module in this package is a fault, named by its file. Nothing is registered.

KIND says what a fault breaks, and so what a plan may aim it at:

    process  a process by its name: `driver`, `policy:1`, `engine:0`, `keeper:0`, `replicator:0`, `supervisor`
    rank     a rank from within, when it reaches a phase that hands over its `owner` (`phases.OWNER_PHASES`)
    node     the node on which a process is
    engine   what travels to an engine; it needs a proxy in front of it, which a drill puts there
    store    a tier by its name: `store:file`
    remote   what travels to a tier: `store:s3`, through such a proxy

A fault whose `heal` is `chaos.scene.nothing_to_heal` is over once it is injected. Every other one lasts: a process of
its own (`chaos.lasting`) injects it, looks for what it does, and heals it. Healing twice must do no harm.
"""

import importlib
import pkgutil
from functools import cache
from typing import Literal, NamedTuple, Protocol, cast

from pydantic import BaseModel

from chaos.scene import Scene, nothing_to_heal
from checkpointing.errors import ConfigError

Kind = Literal["process", "rank", "node", "engine", "store", "remote"]


class Unavailable(ConfigError):
    """What is asked for can't be done here; the message says why."""


class Fault(Protocol):
    """What the module of a fault defines; its first line says what happens."""

    __doc__: str | None
    KIND: Kind
    Parameters: type[BaseModel]

    def available(self) -> str | None:
        """None where it can be done on this machine, else why not."""

    def inject(self, scene: Scene) -> None:
        """Do it to the target, which may be the caller's own process. Raises whatever keeps it from being done."""

    def heal(self, scene: Scene) -> None:
        """Undo it, whatever has become of the target."""

    def witness(self, scene: Scene) -> str | None:
        """Evidence, seen from outside the target, that it happened; None while there is none."""


class Listed(NamedTuple):
    name: str
    kind: str
    what: str
    unavailable: str | None


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def lasts(fault: Fault) -> bool:
    return fault.heal is not nothing_to_heal


def load(name: str) -> Fault:
    """Raises ConfigError where there is no such fault, Unavailable where it can't be done here."""
    fault = find(name)
    if reason := fault.available():
        raise Unavailable(f"the fault {name!r} can't be done here: {reason}")
    return fault


def find(name: str) -> Fault:
    """Raises ConfigError where there is no such fault."""
    if name not in names():
        raise ConfigError(f"there is no fault {name!r}; there are: {', '.join(names())}")
    return cast(Fault, importlib.import_module(f"{__name__}.{name}"))


def catalogue() -> list[Listed]:
    """Every fault, and why one can't be done on this machine."""
    return [
        Listed(name, fault.KIND, (fault.__doc__ or "").splitlines()[0], fault.available())
        for name, fault in ((name, find(name)) for name in names())
    ]
