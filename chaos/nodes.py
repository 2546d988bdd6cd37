"""Ray's daemons on this machine: whose node a process is on, and which head that node belongs to."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from chaos.process import ProcessId, wait_for
from chaos.scene import Scene
from checkpointing.errors import ConfigError

_SESSION = re.compile(r"\S+/session_[^/\s]+")
_GONE_SECONDS = 5.0


def raylet_of(pid: int) -> psutil.Process:
    """The raylet that started process `pid`, or that it started (a driver with a cluster of its own).

    Raises:
        ConfigError: there is none on this machine.
    """
    process = psutil.Process(pid)
    for relative in (*process.parents(), *process.children(recursive=True)):
        if relative.name() == "raylet":
            return relative
    raise ConfigError(f"process {pid} is on no Ray node of this machine")


def members(raylet: psutil.Process) -> list[ProcessId]:
    """The raylet and everything that it started: workers, keepers, its agents."""
    return [ProcessId.of(process.pid) for process in (raylet, *raylet.children(recursive=True))]


def head_of(raylet: psutil.Process) -> psutil.Process:
    """The `gcs_server` of the cluster that a raylet belongs to. Raises ConfigError: it is not on this machine."""
    session = _session(raylet)
    for process in psutil.process_iter():
        try:
            if process.name() == "gcs_server" and session and _session(process) == session:
                return process
        except psutil.NoSuchProcess:
            continue
    raise ConfigError(f"the head of raylet {raylet.pid} is not on this machine")


def _session(process: psutil.Process) -> str | None:
    found = _SESSION.search(" ".join(process.cmdline()).replace("=", " "))
    return found[0] if found else None


def kill(scene: Scene, victims: Sequence[ProcessId]) -> None:
    """SIGKILL to each, the caller's own process last, once the others are seen to be gone."""
    scene.note({"victims": [victim.model_dump() for victim in victims]})
    others = [victim for victim in victims if victim.pid != os.getpid()]
    for victim in others:
        victim.send(signal.SIGKILL)
    wait_for(lambda: all(victim.what_became_of_it() for victim in others), _GONE_SECONDS)
    if len(others) < len(victims):
        os.kill(os.getpid(), signal.SIGKILL)


def ask_back(cluster: Path, raylet: ProcessId, seconds: float) -> None:
    """Whoever runs the cluster, as told by its folder, is to start the node of this raylet anew so long after it was
    lost. Where that is Kubernetes nobody reads it: nodes come back by themselves.
    """
    path = _asked(cluster, raylet)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(str(seconds))
    aside.replace(path)


def asked_back(cluster: Path, raylet: ProcessId) -> float | None:
    """Seconds; None where the node is to stay lost."""
    path = _asked(cluster, raylet)
    return float(path.read_text()) if path.exists() else None


def _asked(cluster: Path, raylet: ProcessId) -> Path:
    return cluster / "back" / f"{raylet.pid}-{raylet.start_ticks}"


def all_gone(scene: Scene) -> list[str]:
    """What is seen in place of the victims; [] while one of them lives, or none is known."""
    victims = [ProcessId.model_validate(victim) for victim in scene.noted().get("victims", [])]
    seen = [victim.what_became_of_it() for victim in victims]
    return [what for what in seen if what] if all(seen) else []
