"""SIGKILL: the process stops at this instruction, with no handler, no `finally` and no flush."""

import os
import signal

from chaos.faults import Kind
from chaos.scene import Parameters, Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


def inject(scene: Scene) -> None:
    os.kill(scene.process.pid, signal.SIGKILL)


def witness(scene: Scene) -> str | None:
    return scene.process.what_became_of_it()
