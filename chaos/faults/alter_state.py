"""One bit of one tensor of the rank's State is wrong in memory."""

from typing import Any, Literal

from pydantic import Field

from chaos import inside
from chaos import scene as scenes
from chaos.faults import Kind
from chaos.scene import Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal
from checkpointing.errors import ConfigError

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "rank"


class Parameters(scenes.Parameters):
    entry: Literal["parameters", "optimizer"] = "parameters"
    bit: int = Field(default=12, ge=0, lt=16)
    """Of the first element, from the least significant. The lowest may be rounded away by the step that follows."""


def inject(scene: Scene) -> None:
    name, data = _tensor(scene)
    scene.note({"tensor": name, "was": data.tolist()})
    byte, bit = divmod(scene.parameters.bit, 8)
    data[byte] ^= 1 << bit


def witness(scene: Scene) -> str | None:
    """Read again from the rank: exactly one bit differs from what was there. Nobody else can see it."""
    noted = scene.noted()
    if not noted or scene.owner is None:
        return None
    name, data = _tensor(scene)
    changed = sum((a ^ b).bit_count() for a, b in zip(noted["was"], data.tolist(), strict=True))
    return f"one bit of {name} has changed" if changed == 1 and name == noted["tensor"] else None


def _tensor(scene: Scene) -> tuple[str, Any]:
    """The name of the first tensor of the entry, and the bytes of its first element, which can be written to."""
    import torch

    for name, parameter in inside.parameters(scene.owner):
        tensor = parameter
        if scene.parameters.entry == "optimizer":
            name, tensor = f"{name}.exp_avg", scene.owner.optimizer.state.get(parameter, {}).get("exp_avg")  # noqa: PLW2901
        if tensor is not None and inside.local(tensor).numel():
            first = inside.local(tensor).view(-1)[:1]
            return name, first.view(torch.uint8)
    raise ConfigError(f"this rank holds no {scene.parameters.entry} now; an optimizer has none before its first step")
