"""Phase trace: when each process of a run reached which place. A drill's report draws it; no part of the journal.

With `HARNESS_TRACE=<folder>` in its environment a process appends a line for each place it reaches (`phases.py`) to
`<folder>/<process>-<pid>.jsonl`, from the moment it has said who it is:

{"time": Unix seconds, "process": "policy:0", "pid": 4711, "phase": "train.forward_backward", "step": 3}

A line is one write and no sync: it outlives the process, which may be killed at that very place, not the machine.
Places that carry no step are in the step that the thread named last, 0 before any.
"""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpointing.disk import explained, write_all
from checkpointing.errors import FormatError
from checkpointing.phases import watch

TRACE_VARIABLE = "HARNESS_TRACE"

_log = logging.getLogger(__name__)


class Mark(BaseModel):
    """`process` reached `phase`. Processes are named as in fault plans: "driver", "policy:0", "keeper:1"."""

    model_config = ConfigDict(frozen=True)

    time: float
    process: str
    pid: int
    phase: str
    step: int


def trace_folder(run_dir: Path) -> Path:
    return run_dir / "trace"


def trace_phases() -> None:
    """Have this process leave its trace, if the environment asks for that. Once, before it says who it is."""
    if folder := os.environ.get(TRACE_VARIABLE):
        watch(TraceWriter(Path(folder)).hear)


class TraceWriter:
    """Never fails what it watches: when storage refuses a line, a warning is logged and the trace ends there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # a save commits in a thread of its own
        self._here = threading.local()  # ... for a step of its own
        self._name = ""
        self._pid, self._fd = -1, -1  # a forked child inherits this object but is not its parent

    def hear(self, name: str, where: dict[str, Any]) -> None:
        if where.get("step") is not None:
            self._here.step = where["step"]
        who, pid = self._name, os.getpid()
        try:
            if name in ("driver.started", "worker.started"):
                who = "driver" if where["role"] == "driver" else f"{where['role']}:{where['rank']}"
                pid = where.get("pid", pid)
                if pid == os.getpid():
                    self._open(who)
            if os.getpid() == self._pid and self._fd >= 0:
                step = getattr(self._here, "step", 0)
                mark = Mark(time=time.time(), process=who, pid=pid, phase=name, step=step)
                with self._lock:
                    write_all(self._fd, mark.model_dump_json().encode() + b"\n")
        except OSError as error:
            self._fd = -1
            _log.warning("the phase trace of %s ends here: %s", who, error)

    def _open(self, name: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name, self._pid = name, os.getpid()
        # No colon: artifact stores refuse it in file names.
        path = self._folder / f"{name.replace(':', '-')}-{self._pid}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def read_trace(folder: Path) -> list[Mark]:
    """Every mark in `folder`, by time. [] if there is no trace. A torn last line is passed over.

    Raises:
        FormatError: a line is no mark; names file and line.
        StoreError: storage refused.
    """
    marks = []
    for path in sorted(folder.glob("*.jsonl")):
        with explained(f"read {path}"):
            lines = path.read_bytes().split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                marks.append(Mark.model_validate_json(line))
            except ValidationError as error:
                message = error.errors(include_url=False)[0]["msg"]
                raise FormatError(f"{path}:{number}: not a line of a phase trace: {message}") from error
    return sorted(marks, key=lambda mark: mark.time)
