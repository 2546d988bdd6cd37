"""Where the step loop of a run is, for whoever watches it from outside: a small file that each phase overwrites.

Only code that trains writes it, so that a process which is alive and does nothing shows as one that does nothing. It is
no part of the journal: a line there costs a sync, and nothing here is worth keeping through a power cut.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpointing.disk import explained, make_folder

PHASE_OF = {
    "driver.started": "start",
    "rebuild.begin": "start",
    "restore.begin": "restore",
    "restore.end": "data",
    "evaluate.begin": "evaluate",
    "generate.begin": "generate",
    "generate.request": "generate",
    "reward.begin": "reward",
    "forward.begin": "forward",
    "train.begin": "train",
    "step.trained": "step end",
    "save.wait": "save",
    "save.begin": "save",
    "weight_sync.begin": "weight sync",
    "weight_sync.end": "data",
    "finish.begin": "finish",
}
"""What the driver's own thread is doing from the time it has reached such a place (`phases.py`)."""

_WRITING = frozenset({"save.write", "save.before_manifest", "save.before_commit"})
"""Reached by the thread that writes a save, behind training; `save.committed` ends it."""

OUTSIDE_STEPS = frozenset({"start", "restore", "finish"})
WIDE = OUTSIDE_STEPS | {"evaluate", "step end", "save", "writing"}
"""Phases whose length depends on more than the step: on storage, models, exports, the size of an evaluation."""

_SIZE = 384


class Place(BaseModel):
    """`signs` counts what was reached so far, `time` is when the last was, `since` when this phase of this step began;
    both in Unix seconds."""

    model_config = ConfigDict(frozen=True)

    phase: str
    step: int
    signs: int
    time: float
    since: float


class Progress(BaseModel):
    """`loop` is the driver's own thread; `writing` the save behind it, None while there is none."""

    model_config = ConfigDict(frozen=True)

    loop: Place
    writing: Place | None = None


def progress_path(run_dir: Path, attempt: int) -> Path:
    """Each attempt has its own: one that wakes up late must not speak for the one that took its place."""
    return run_dir / "progress" / f"{attempt:06d}.json"


class ProgressFile:
    """Writes one attempt's progress: `phases.watch(ProgressFile(path).hear)`. Raises StoreError if it can't be made."""

    def __init__(self, path: Path) -> None:
        with explained(f"open {path}"):
            make_folder(path.parent)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._lock = threading.Lock()
        now = time.time()
        self._now = Progress(loop=Place(phase="start", step=0, signs=0, time=now, since=now))
        self._write()

    def hear(self, name: str, where: dict[str, Any]) -> None:
        main = threading.current_thread() is threading.main_thread()
        with self._lock:
            now = self._now
            if main and name in PHASE_OF:
                phase = "evaluate" if where.get("phase") == "eval" else PHASE_OF[name]
                self._now = now.model_copy(update={"loop": _moved(now.loop, phase, where)})
            elif name in _WRITING:
                self._now = now.model_copy(update={"writing": _moved(now.writing or now.loop, "writing", where)})
            elif name == "save.committed":
                self._now = now.model_copy(update={"writing": None})
            else:
                return
            self._write()

    def _write(self) -> None:
        # One write of one size: readers meet the old line or the new one, and a disk that is full by then has room.
        os.pwrite(self._fd, self._now.model_dump_json().encode().ljust(_SIZE), 0)


def _moved(before: Place, phase: str, where: dict[str, Any]) -> Place:
    step, now = where.get("step") or before.step, time.time()
    since = before.since if (phase, step) == (before.phase, before.step) else now
    return Place(phase=phase, step=step, signs=before.signs + 1, time=now, since=since)


def read_progress(path: Path) -> Progress | None:
    """None if there is none yet, or it is just being written."""
    try:
        return Progress.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
