"""The process is at its memory limit, as in a container: the kernel kills it as soon as it takes more."""

import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from chaos.faults import Kind
from chaos.scene import Parameters, Scene

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"
_BYTES = 0
"""What it may yet take, not a page: what it has is charged to the group that it comes from."""


class _Hierarchy(NamedTuple):
    """Control groups: where they lie, the file that sets a group's limit, the one that counts whom it has killed."""

    root: Path
    limit: str
    events: str


_V2 = _Hierarchy(Path("/sys/fs/cgroup"), "memory.max", "memory.events")
_V1 = _Hierarchy(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control")


@cache
def available() -> str | None:
    try:
        Path(tempfile.mkdtemp(prefix="harness-", dir=_hierarchy().root)).rmdir()
    except OSError as error:
        return f"no control group with a memory limit can be made here: {error}"
    return None


def inject(scene: Scene) -> None:
    folder = _hierarchy().root / f"harness-{scene.process.pid}"
    former = _group_of(scene.process.pid)
    folder.mkdir(exist_ok=True)
    scene.note({"group": str(folder), "former": str(former)})
    (folder / _hierarchy().limit).write_text(str(_BYTES))
    (folder / "cgroup.procs").write_text(str(scene.process.pid))


def heal(scene: Scene) -> None:
    if "group" not in scene.noted():
        return
    group = Path(scene.noted()["group"])
    with suppress(OSError):  # it has died
        (Path(scene.noted()["former"]) / "cgroup.procs").write_text(str(scene.process.pid))
    with suppress(FileNotFoundError):
        group.rmdir()


def witness(scene: Scene) -> str | None:
    """Gone, and the kernel has counted it among those that it killed for want of memory in that group."""
    noted = scene.noted()
    with suppress(KeyError, FileNotFoundError):
        if _killed(Path(noted["group"])) and not noted.get("killed"):
            scene.note({"killed": True})
    gone = scene.process.what_became_of_it()
    return f"{gone}, killed by the kernel at its memory limit" if gone and scene.noted().get("killed") else None


def _killed(group: Path) -> bool:
    counts = dict(line.split() for line in (group / _hierarchy().events).read_text().splitlines())
    return int(counts["oom_kill"]) > 0


@cache
def _hierarchy() -> _Hierarchy:
    controllers = _V2.root / "cgroup.subtree_control"
    return _V2 if controllers.exists() and "memory" in controllers.read_text().split() else _V1


def _group_of(pid: int) -> Path:
    """Of `pid` in that hierarchy; see cgroups(7)."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" if _hierarchy() is _V2 else "memory" in controllers.split(","):
            return _hierarchy().root / path.lstrip("/")
    raise FileNotFoundError(f"process {pid} is in no control group of {_hierarchy().root}")
