"""One bit of a blob of the newest commit is wrong, as on a disk that decays."""

from chaos import damage
from chaos.damage import BlobParameters as Parameters
from chaos.faults import Kind
from chaos.scene import Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal
from checkpointing.canonical import digest

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def inject(scene: Scene) -> None:
    key = damage.note_blob(scene)
    data = bytearray(damage.read(scene) or b"")
    data[len(data) // 2] ^= 1
    damage.write(scene, key, bytes(data))


def witness(scene: Scene) -> str | None:
    noted = scene.noted()
    data = damage.read(scene) if noted else None
    if data is None or len(data) != noted["size"] or digest(data) == noted["digest"]:
        return None
    return f"{noted['key']}: its {len(data)} bytes have digest {digest(data)}"
