"""Is the run still going on? Deadlines for each phase, learned from the run itself.

A phase may be silent for a multiple of the longest silence after which it went on, and never less than the config says.
Silence is measured by this process's own looking: neither a clock that is set nor a machine that sleeps makes a hang.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from checkpointing.progress import WIDE, Place, read_progress
from harness.config import Supervision

MULTIPLE = 5.0
"""Of the longest silence seen in a phase."""

LONGEST_LOOK = 5.0
"""Seconds that the time between two looks counts at most: if it was longer, the watcher was not running either."""


class Overdue(NamedTuple):
    """Nothing was heard for `seconds` since `phase` of `step` began or last went on; `limit` was allowed."""

    phase: str
    step: int
    seconds: float
    limit: float

    def __str__(self) -> str:
        return f"no sign of {self.phase} at step {self.step} for {self.seconds:.0f} s (limit {self.limit:.0f} s)"


@dataclass
class _Silence:
    """Since when one thread of the driver was not heard of."""

    place: Place | None = None
    seconds: float = 0.0


class Deadlines:
    """What one supervisor has learned about its run. `begin` for each attempt, then `check` now and then."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._longest: dict[str, float] = {}

    def begin(self, path: Path, now: float) -> None:
        """Watch the attempt whose progress is written to `path`. `now` here and below: monotonic seconds."""
        self._path, self._looked = path, now
        self._loop, self._writing = _Silence(), _Silence()

    @property
    def place(self) -> Place | None:
        """Where the step loop of the attempt was last heard of; None before it was."""
        return self._loop.place

    def limit(self, phase: str) -> float:
        unknown = phase not in self._longest
        floor = self._limits.wide_seconds if unknown or phase in WIDE else self._limits.phase_seconds
        if phase == "start":
            floor += self._limits.node_wait_seconds  # it is silent meanwhile
        return max(floor, MULTIPLE * self._longest.get(phase, 0.0))

    def check(self, now: float, waits_for_engine: bool = False) -> Overdue | None:
        """Look, and learn. Returns what is overdue, if something is. While the step loop can do nothing but wait for
        an engine that is being started, its clock stands at 0."""
        passed = min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        seen = read_progress(self._path)
        if seen is not None:
            self._hear(self._loop, seen.loop)
            self._hear(self._writing, seen.writing)
        if waits_for_engine:
            self._loop.seconds = -passed
        overdue = [self._overdue(self._loop, passed)]
        if self._writing.place is not None:
            overdue.append(self._overdue(self._writing, passed))
        return next((one for one in overdue if one is not None), None)

    def _hear(self, silence: _Silence, place: Place | None) -> None:
        if place == silence.place:
            return
        if silence.place is not None:
            phase = silence.place.phase
            self._longest[phase] = max(self._longest.get(phase, 0.0), silence.seconds)
        silence.place, silence.seconds = place, 0.0

    def _overdue(self, silence: _Silence, passed: float) -> Overdue | None:
        silence.seconds += passed
        phase, step = (silence.place.phase, silence.place.step) if silence.place else ("start", 0)
        limit = self.limit(phase)
        return Overdue(phase, step, silence.seconds, limit) if silence.seconds > limit else None
