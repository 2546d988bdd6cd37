"""The engine answers 503, or half a body."""

from typing import Literal

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
    answer: Literal["503", "half"] = "503"
    at: int = Field(default=16, ge=0)
    """Bytes after which half a body ends."""


def inject(scene: Scene) -> None:
    told = scene.parameters
    if told.answer == "503":
        rules.impose(scene, "status", status=503, code="unavailable")
    else:
        rules.impose(scene, "truncate", method="POST", at=told.at)
