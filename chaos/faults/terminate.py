"""SIGTERM to one process. What can be seen of it is that the process ends in time; of one that ignores it, nothing."""

from pydantic import Field

from chaos import scene as scenes
from chaos import signals
from chaos.faults import Kind
from chaos.scene import Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


class Parameters(scenes.Parameters):
    grace_seconds: float = Field(default=60.0, gt=0)
    """Within which a process that handles SIGTERM ends."""


def inject(scene: Scene) -> None:
    signals.terminate(scene, [scene.process])


def heal(scene: Scene) -> None:
    """It lasts only so that its end is awaited: nothing can be undone."""


def witness(scene: Scene) -> str | None:
    return next(iter(signals.gone_in_time(scene, scene.parameters.grace_seconds)), None)
