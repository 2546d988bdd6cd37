"""What the faults share that can't be done by the processes of a run: they are listed, with the reason, and refused."""

from chaos.scene import Scene
from checkpointing.errors import ConfigError


def inject(scene: Scene) -> None:
    raise ConfigError(f"the fault {scene.fired.fault!r} can't be done here")


def heal(scene: Scene) -> None:
    """Nothing was done."""


def witness(scene: Scene) -> str | None:
    return None
