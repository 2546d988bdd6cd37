"""The process is slow: stopped for a share of the time, in short turns, so that it does its work but late."""

import os
import signal
import sys

from pydantic import Field

from chaos import scene as scenes
from chaos.faults import Kind
from chaos.process import ProcessId
from chaos.scene import Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"


class Parameters(scenes.Parameters):
    share: float = Field(default=0.5, gt=0, lt=1)
    """Of the time in which it is stopped."""
    period: float = Field(default=0.4, gt=0)
    """Seconds from one stop to the next."""


_TURNS = """
import sys, time
from chaos.process import ProcessId
pid, ticks, stopped, running = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
victim = ProcessId(pid=pid, start_ticks=ticks)
while victim.what_became_of_it() is None:
    victim.send(19)
    time.sleep(stopped)
    victim.send(18)
    time.sleep(running)
"""


def inject(scene: Scene) -> None:
    victim, told = scene.process, scene.parameters
    stopped = told.share * told.period
    turns = [victim.pid, victim.start_ticks, stopped, told.period - stopped]
    command = [sys.executable, "-c", _TURNS, *map(str, turns)]
    pid = os.posix_spawn(sys.executable, command, os.environ, setsid=True)
    scene.note({"turns": ProcessId.of(pid).model_dump()})


def heal(scene: Scene) -> None:
    if turns := scene.noted().get("turns"):
        ProcessId.model_validate(turns).send(signal.SIGKILL)
    scene.process.send(signal.SIGCONT)


def witness(scene: Scene) -> str | None:
    """Seen stopped after it was seen running, three times: one that hangs is no straggler."""
    if scene.process.what_became_of_it():
        return None
    noted, stopped = scene.noted(), scene.process.is_stopped()
    times = noted.get("times", 0)
    if stopped != noted.get("stopped", False):
        times += stopped
        scene.note({"stopped": stopped, "times": times})
    return f"pid {scene.process.pid} was stopped and went on, {times} times" if times >= 3 and not stopped else None
