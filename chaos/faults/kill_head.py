"""The head is lost: SIGKILL to the `gcs_server` of the cluster that the target's node belongs to."""

from chaos import nodes
from chaos.faults import Kind
from chaos.process import ProcessId
from chaos.scene import Parameters, Scene
from chaos.scene import anywhere as available
from chaos.scene import nothing_to_heal as heal

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "node"


def inject(scene: Scene) -> None:
    head = nodes.head_of(nodes.raylet_of(scene.process.pid))
    nodes.kill(scene, [ProcessId.of(head.pid)])


def witness(scene: Scene) -> str | None:
    gone = nodes.all_gone(scene)
    return f"gcs_server: {gone[0]}" if gone else None
