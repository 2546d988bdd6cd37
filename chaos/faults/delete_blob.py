"""A blob of the newest commit is gone."""

from chaos import damage
from chaos.damage import BlobParameters as Parameters
from chaos.faults import Kind
from chaos.scene import Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


def inject(scene: Scene) -> None:
    damage.delete(scene, damage.note_blob(scene))


def witness(scene: Scene) -> str | None:
    noted = scene.noted()
    return f"{noted['key']} is gone" if noted and damage.read(scene) is None else None
