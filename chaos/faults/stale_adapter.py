"""The engine keeps an old adapter: it is told to load the next one, seems to have done so, and has not."""

from pydantic import Field

from chaos import rules
from chaos import scene as scenes
from chaos.faults import Kind
from chaos.rules import applied as witness
from chaos.rules import lift as heal
from chaos.scene import Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "engine"


class Parameters(scenes.Parameters):
    times: int = Field(default=1, ge=1)
    """How many adapters it misses."""


def inject(scene: Scene) -> None:
    rules.impose(scene, "swallow", method="POST", target="load_lora_adapter", times=scene.parameters.times)
