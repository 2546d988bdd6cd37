"""The node is drained: its pod is evicted, with notice. Its disruption budget may refuse that, and the fault fails."""

from chaos import kubernetes
from chaos.faults import Kind
from chaos.kubernetes import ended as witness
from chaos.kubernetes import why_not as available
from chaos.scene import Parameters, Scene
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "node"


def inject(scene: Scene) -> None:
    kubernetes.evict(scene)
