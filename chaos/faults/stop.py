"""SIGSTOP, and SIGCONT when it is over: a process that hangs, and one that wakes up when nobody expects it any more."""

import signal

from chaos.faults import Kind
from chaos.scene import Parameters, Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


def inject(scene: Scene) -> None:
    scene.process.send(signal.SIGSTOP)


def heal(scene: Scene) -> None:
    scene.process.send(signal.SIGCONT)


def witness(scene: Scene) -> str | None:
    return f"pid {scene.process.pid} is stopped" if scene.process.is_stopped() else None
