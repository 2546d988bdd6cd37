"""The file system of a tier is gone: its folder is empty and can't be written to."""

from chaos import mounts
from chaos.faults import Kind
from chaos.mounts import why_not as available
from chaos.scene import Parameters, Scene

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def inject(scene: Scene) -> None:
    folder = scene.store_folder
    scene.note({"names": sorted(path.name for path in folder.iterdir()), "mounted": True})
    mounts.mount("-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder))


def heal(scene: Scene) -> None:
    if scene.noted().get("mounted"):
        mounts.unmount(scene.store_folder)
        scene.note({"mounted": False})


def witness(scene: Scene) -> str | None:
    names = scene.noted().get("names", [])
    if not names or any(scene.store_folder.iterdir()):
        return None
    return f"{scene.store_folder} is empty, {len(names)} names that were in it are gone"
