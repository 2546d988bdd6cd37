"""Every process of a run carries the run's tag in its environment, so it can be found and ended whoever its parent is."""

import ctypes
import os
import signal
import socket
from pathlib import Path

import psutil

TAG = "HARNESS_TAG"


def run_tag(run_dir: Path) -> str:
    """The same for every supervisor of this run, so that a new one can end what a killed one left behind."""
    return str(run_dir.resolve())


def tagged(tag: str) -> list[psutil.Process]:
    """Processes of this machine that inherited the tag, this one excluded."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(TAG) == tag:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def reap(tag: str) -> list[str]:
    """SIGKILL everything that carries the tag and wait until it is gone. Returns what was ended, as "pid name"."""
    ended = []
    while victims := tagged(tag):
        for process in victims:
            try:
                ended.append(f"{process.pid} {process.name()}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(victims, timeout=10)
    return ended


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel ends this child when the supervisor dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
