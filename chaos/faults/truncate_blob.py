"""A blob of the newest commit has lost its second half."""

from chaos import damage
from chaos.damage import BlobParameters as Parameters
from chaos.faults import Kind
from chaos.scene import Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def inject(scene: Scene) -> None:
    key = damage.note_blob(scene)
    data = damage.read(scene) or b""
    damage.write(scene, key, data[: len(data) // 2])


def witness(scene: Scene) -> str | None:
    noted = scene.noted()
    data = damage.read(scene) if noted else None
    if data is None or len(data) >= noted["size"]:
        return None
    return f"{noted['key']}: {len(data)} of {noted['size']} bytes are left"
