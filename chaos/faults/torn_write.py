"""The newest commit's record or manifest is torn: its length is right, its second half zeros, as after a power cut."""

from typing import Literal

from chaos import damage
from chaos import scene as scenes
from chaos.faults import Kind
from chaos.scene import Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"


class Parameters(scenes.Parameters):
    file: Literal["commit", "manifest"] = "commit"


def inject(scene: Scene) -> None:
    key = damage.note_record(scene, scene.parameters.file)
    data = damage.read(scene) or b""
    half = len(data) // 2
    damage.write(scene, key, data[:half] + bytes(len(data) - half))


def witness(scene: Scene) -> str | None:
    noted = scene.noted()
    data = damage.read(scene) if noted else None
    torn = data is not None and len(data) == noted["size"] and not any(data[len(data) // 2 :])
    return f"{noted['key']}: the second half of its {noted['size']} bytes is zero" if torn else None
