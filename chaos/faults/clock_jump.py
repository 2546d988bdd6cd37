"""The clock of a process jumps."""

from chaos.faults import Kind
from chaos.scene import Parameters, Scene
from chaos.scene import nothing_to_heal as heal
from checkpointing.errors import ConfigError

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


def available() -> str | None:
    return (
        "the clock of one process is moved by libfaketime alone, which is not installed with the harness; moving the "
        "machine's would hit everything on it"
    )


def inject(scene: Scene) -> None:
    raise ConfigError(f"the fault {scene.fired.fault!r} can't be done here: {available()}")


def witness(scene: Scene) -> str | None:
    return None
