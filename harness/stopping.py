"""Being asked to stop: SIGTERM (preemption, `kubectl delete`), Ctrl-C, or the file that `harness stop` leaves."""

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

STOP_FILE = "stop"
"""In the run directory. A file and not a signal: the supervisor may be on another machine."""


class StopRequest:
    """A context manager around a supervised run. Signals are heard where Python allows it, in the main thread."""

    def __init__(self, run_dir: Path, grace_seconds: float) -> None:
        self._file, self._grace = run_dir / STOP_FILE, grace_seconds
        self._since: float | None = None
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._file.unlink(missing_ok=True)  # meant for a supervisor before this one
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._file.unlink(missing_ok=True)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # Whoever signals a process and then its group sends one request twice.
        self._at_once = self._since is not None and time.monotonic() - self._since > 1.0
        self._since = self._since or time.monotonic()

    @property
    def asked(self) -> bool:
        if self._since is None and self._file.exists():
            self._since = time.monotonic()
        return self._since is not None

    @property
    def over(self) -> bool:
        """The time of grace has passed, or somebody asked twice."""
        return self._since is not None and (self._at_once or time.monotonic() - self._since > self._grace)

    def sleep(self, seconds: float) -> None:
        """Up to `seconds`, less if asked to stop meanwhile."""
        end = time.monotonic() + seconds
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
