"""A process, named so that a later one with the same pid is not taken for it.

The start is read in clock ticks since boot, straight from the kernel: unlike a time of day it does not move when the
clock is set, which is itself a fault that drills inject.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict


class ProcessId(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """Raises ProcessLookupError where there is no such process."""
        found = _stat(pid)
        if found is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid=pid, start_ticks=found[1])

    @classmethod
    def current(cls) -> "ProcessId":
        return cls.of(os.getpid())

    def what_became_of_it(self) -> str | None:
        """None while it runs (stopped counts as running), else what is seen in its place."""
        found = _stat(self.pid)
        if found is None:
            return f"pid {self.pid} has gone"
        state, start_ticks = found
        if start_ticks != self.start_ticks:
            return f"pid {self.pid} now belongs to a later process"
        if state in "ZX":
            return f"pid {self.pid} is dead and not yet reaped"
        return None

    def is_stopped(self) -> bool:
        """By a signal; it still exists and computes nothing."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] in "Tt"

    def send(self, signal: int) -> None:
        """Nothing happens where it is gone: a later process with its pid is left alone."""
        if self.what_became_of_it() is None:
            os.kill(self.pid, signal)


def loader_workers(driver: ProcessId) -> list[ProcessId]:
    """Children that Python's `multiprocessing` has spawned, as torch's DataLoader does; oldest first."""
    try:
        children = psutil.Process(driver.pid).children()
        return [ProcessId.of(child.pid) for child in children if "--multiprocessing-fork" in child.cmdline()]
    except (psutil.NoSuchProcess, ProcessLookupError):
        return []


def wait_for[T](look: Callable[[], T], seconds: float) -> T:
    """What `look` gives once it gives something, or when the time is over."""
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start of a process; see proc_pid_stat(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name in parentheses may itself hold spaces and parentheses
    return fields[0], int(fields[19])
