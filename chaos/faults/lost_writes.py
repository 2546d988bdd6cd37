"""Power is cut: all processes of the run that write to the store die, and what they had not synced is lost with them.

It needs `disk_bytes` in the drill: the disk is real, and what a real file system makes of it afterwards is what counts.
Engines, the supervisor and other machines live on.
"""

import signal

from chaos import disks
from chaos.directory import PlanDirectory
from chaos.disks import why_not as available
from chaos.faults import Kind
from chaos.process import ProcessId, wait_for
from chaos.scene import Parameters, Scene

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "store"
_PROBE, _BYTES = ".unsynced", b"written" * 1000
_SPARED = ("engine", "supervisor")
_STOPPED_SECONDS = 5.0


def inject(scene: Scene) -> None:
    folder, victims = scene.store_folder, _writers(scene)
    disks.require(folder)
    scene.note({"victims": [victim.model_dump() for victim in victims]})
    for victim in victims:  # stopped before anybody dies: nobody may notice and write while the disk is exchanged
        victim.send(signal.SIGSTOP)
    # Who is still at work then waits for the disk, and is refused.
    wait_for(lambda: all(one.is_stopped() or one.what_became_of_it() for one in victims), _STOPPED_SECONDS)
    (folder / _PROBE).write_bytes(_BYTES)
    disks.cut_power(folder)
    scene.note({"cut": True})
    heal(scene)


def heal(scene: Scene) -> None:
    """Nobody stays stopped, should it have gone wrong half-way."""
    for victim in map(ProcessId.model_validate, scene.noted().get("victims", [])):
        victim.send(signal.SIGKILL)


def witness(scene: Scene) -> str | None:
    if not scene.noted().get("cut"):
        return None
    path = scene.store_folder / _PROBE
    left = path.read_bytes() if path.exists() else b""
    return f"of {len(_BYTES)} bytes that were written and not synced {len(left)} are left" if left != _BYTES else None


def _writers(scene: Scene) -> list[ProcessId]:
    announced = PlanDirectory(scene.folder.parent).announced()
    return [process for name, process in announced.items() if name.partition(":")[0] not in _SPARED]
