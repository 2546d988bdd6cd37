"""The file system of a tier turns read-only, as after an error of its disk."""

import errno
import tempfile

from chaos import mounts
from chaos.faults import Kind
from chaos.mounts import why_not as available
from chaos.scene import Parameters, Scene

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def inject(scene: Scene) -> None:
    folder = str(scene.store_folder)
    scene.note({"mounted": True})
    mounts.mount("--bind", folder, folder)
    mounts.mount("-o", "remount,bind,ro", folder)


def heal(scene: Scene) -> None:
    if scene.noted().get("mounted"):
        mounts.unmount(scene.store_folder)
        scene.note({"mounted": False})


def witness(scene: Scene) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(dir=scene.store_folder, prefix=".probe-"):
            return None
    except OSError as error:
        if error.errno != errno.EROFS:
            return None
        return f"making a file in {scene.store_folder}: {error.strerror}"
