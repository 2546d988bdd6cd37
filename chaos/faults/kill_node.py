"""A node is lost: SIGKILL to the raylet of the node that the target is on, and to everything that it started."""

from pydantic import Field

from chaos import nodes
from chaos import scene as scenes
from chaos.faults import Kind
from chaos.process import ProcessId
from chaos.scene import Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "node"


class Parameters(scenes.Parameters):
    back_after: float | None = Field(default=None, ge=0)
    """Seconds until the node is back. None: it stays lost. Where Kubernetes runs the nodes, that decides both."""


def inject(scene: Scene) -> None:
    raylet, cluster = nodes.raylet_of(scene.process.pid), scene.fired.site.cluster
    if scene.parameters.back_after is not None and cluster is not None:
        nodes.ask_back(cluster, ProcessId.of(raylet.pid), scene.parameters.back_after)
    nodes.kill(scene, nodes.members(raylet))


def witness(scene: Scene) -> str | None:
    gone = nodes.all_gone(scene)
    return f"raylet: {gone[0]}, and {len(gone) - 1} processes of its node" if gone else None
