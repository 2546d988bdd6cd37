"""The file system of a tier is slow: by turns nothing can be written. It needs `disk_bytes` in the drill."""

import os
import signal
import sys
import tempfile
import time

from pydantic import Field

from chaos import disks
from chaos import scene as scenes
from chaos.disks import why_not as available
from chaos.faults import Kind
from chaos.process import ProcessId
from chaos.scene import Scene

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


class Parameters(scenes.Parameters):
    frozen: float = Field(default=1.0, gt=0)
    """Seconds at a time in which nothing can be written."""
    period: float = Field(default=1.2, gt=0)
    """Seconds from the beginning of one such time to that of the next."""


_TURNS = """
import sys, time
from pathlib import Path
from chaos import disks
folder, frozen, period = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while True:
    disks.freeze(folder)
    time.sleep(frozen)
    disks.thaw(folder)
    time.sleep(max(period - frozen, 0.01))
"""


def inject(scene: Scene) -> None:
    folder, told = scene.store_folder, scene.parameters
    disks.require(folder)
    command = [sys.executable, "-c", _TURNS, str(folder), str(told.frozen), str(told.period)]
    pid = os.posix_spawn(sys.executable, command, os.environ, setsid=True)
    scene.note({"turns": ProcessId.of(pid).model_dump()})


def heal(scene: Scene) -> None:
    if turns := scene.noted().get("turns"):
        ProcessId.model_validate(turns).send(signal.SIGKILL)
        disks.thaw(scene.store_folder)


def witness(scene: Scene) -> str | None:
    """A write of one byte that took as long as half the time in which nothing can be written."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(dir=scene.store_folder, prefix=".probe-") as probe:
        probe.write(b"x")
        probe.flush()
        os.fsync(probe.fileno())
    took = time.monotonic() - began
    return f"to write and sync one byte took {took:.1f} s" if took >= scene.parameters.frozen / 2 else None
