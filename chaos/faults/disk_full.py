"""The disk of a tier is full. It needs a small file system of its own, which `disk_bytes` of a drill mounts."""

import errno
import os
import tempfile

from chaos import mounts
from chaos.faults import Kind
from chaos.mounts import why_not as available
from chaos.scene import Parameters, Scene
from checkpointing.errors import ConfigError

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"
_PROBE = 64 * 1024


def inject(scene: Scene) -> None:
    folder = scene.store_folder
    if mounts.kind(folder) != "tmpfs":
        raise ConfigError(f"{folder} is on no small file system of its own; set `disk_bytes` in the drill")
    now = os.statvfs(folder)
    scene.note({"bytes": now.f_blocks * now.f_frsize})
    mounts.mount("-o", f"remount,size={(now.f_blocks - now.f_bfree) * now.f_frsize}", str(folder))


def heal(scene: Scene) -> None:
    if (size := scene.noted().get("bytes")) and mounts.kind(scene.store_folder) == "tmpfs":
        mounts.mount("-o", f"remount,size={size}", str(scene.store_folder))


def witness(scene: Scene) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=scene.store_folder, prefix=".probe-") as probe:
            probe.write(bytes(_PROBE))
            probe.flush()
            return None
    except OSError as error:
        return f"writing {_PROBE} bytes: {error.strerror}" if error.errno == errno.ENOSPC else None
