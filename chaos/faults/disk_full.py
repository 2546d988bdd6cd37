"""The disk of a tier is full. It needs one of its own, which `disk_bytes` of a drill mounts."""

import errno
import os
import tempfile
from pathlib import Path

from chaos import disks
from chaos.disks import why_not as available
from chaos.faults import Kind
from chaos.scene import Parameters, Scene

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"
_PROBE = 64 * 1024
_LEAST = 4096


def inject(scene: Scene) -> None:
    disks.require(scene.store_folder)
    scene.note({"filled": True})
    with _filler(scene).open("ab") as filler:
        now = os.statvfs(scene.store_folder)
        size = now.f_bavail * now.f_frsize
        while size >= _LEAST:  # some of what is free goes to the file system's own books
            try:
                os.posix_fallocate(filler.fileno(), filler.seek(0, os.SEEK_END), size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


def heal(scene: Scene) -> None:
    if scene.noted().get("filled"):
        _filler(scene).unlink(missing_ok=True)


def witness(scene: Scene) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=scene.store_folder, prefix=".probe-") as probe:
            probe.write(bytes(_PROBE))
            probe.flush()
            return None
    except OSError as error:
        return f"writing {_PROBE} bytes: {error.strerror}" if error.errno == errno.ENOSPC else None


def _filler(scene: Scene) -> Path:
    return scene.store_folder / ".filler"
