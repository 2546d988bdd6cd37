"""The pod that the target is in is deleted. Kubernetes alone can do so; whoever owns the pod makes another one."""

from pydantic import Field

from chaos import kubernetes
from chaos import scene as scenes
from chaos.faults import Kind
from chaos.kubernetes import ended as witness
from chaos.kubernetes import why_not as available
from chaos.scene import Scene
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "node"


class Parameters(scenes.Parameters):
    grace_seconds: int | None = Field(default=None, ge=0)
    """From SIGTERM to SIGKILL. None: as the pod's own `terminationGracePeriodSeconds`. 0: at once."""


def inject(scene: Scene) -> None:
    kubernetes.delete(scene, scene.parameters.grace_seconds)
