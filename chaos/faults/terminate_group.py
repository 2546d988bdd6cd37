"""SIGTERM to every process of the target's session, as a scheduler or a terminal sends it."""

import os

import psutil
from pydantic import Field

from chaos import scene as scenes
from chaos import signals
from chaos.faults import Kind
from chaos.process import ProcessId
from chaos.scene import Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


class Parameters(scenes.Parameters):
    grace_seconds: float = Field(default=60.0, gt=0)
    """Within which those that handle SIGTERM end."""


def inject(scene: Scene) -> None:
    signals.terminate(scene, _session(scene.process.pid))


def heal(scene: Scene) -> None:
    """It lasts only so that its end is awaited: nothing can be undone."""


def witness(scene: Scene) -> str | None:
    gone = signals.gone_in_time(scene, scene.parameters.grace_seconds)
    return f"of {len(scene.noted()['told'])} told: {', '.join(gone)}" if gone else None


def _session(pid: int) -> list[ProcessId]:
    session, members = os.getsid(pid), []
    for member in psutil.pids():
        try:
            if os.getsid(member) == session and member != os.getpid():
                process = ProcessId.of(member)
                members += [] if process.what_became_of_it() else [process]
        except ProcessLookupError:
            continue
    return members
