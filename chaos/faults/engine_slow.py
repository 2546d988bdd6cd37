"""The engine answers late."""

from chaos import rules
from chaos.faults import Kind
from chaos.rules import Late as Parameters
from chaos.rules import applied as witness
from chaos.rules import lift as heal
from chaos.scene import Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "engine"


def inject(scene: Scene) -> None:
    rules.impose(scene, "delay", seconds=scene.parameters.delay)
