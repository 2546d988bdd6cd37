"""The object store is asked too often, and says so: 503 SlowDown."""

from chaos import rules
from chaos.faults import Kind
from chaos.rules import applied as witness
from chaos.rules import lift as heal
from chaos.scene import Parameters, Scene
from chaos.scene import anywhere as available

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "remote"


def inject(scene: Scene) -> None:
    rules.impose(scene, "status", status=503, code="SlowDown")
