"""The object store is down: connections are reset."""

from chaos import rules
from chaos.faults import Kind
from chaos.rules import applied as witness
from chaos.rules import lift as heal
from chaos.scene import Parameters, Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "remote"


def inject(scene: Scene) -> None:
    rules.impose(scene, "drop")
