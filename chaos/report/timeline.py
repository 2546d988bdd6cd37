"""What each process of a run was doing when: lanes of bars, with faults, their detection and the recovery marked.

The lane "run" comes from the journal, the others from the phase trace. A trace says what was reached, not what has
ended: the driver does one thing until its next one, a rank until its own next one or until the driver goes on.
Positions are in thousandths of the timeline.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from chaos.recovery import recoveries, struck
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    EngineLost,
    EngineServing,
    FaultWitnessed,
    HangDetected,
    StateRestored,
    StepDone,
)
from checkpointing.journal import Record
from checkpointing.progress import PHASE_OF
from checkpointing.trace import Mark

_RANK_PHASES = {
    "worker.started": "start",
    "restore.rank": "restore",
    "train.forward_backward": "train",
    "train.optimizer": "optimizer",
    "save.capture": "save",
}
_ENGINE_PHASES = ("generate", "evaluate", "weight sync")
_ROLES = ("driver", "engine", "policy", "critic", "ref", "keeper", "replicator")
_MERGED = 0.002
"""Places that a background process reaches within this share of the timeline are drawn as one bar."""


Cut = Callable[..., float]
"""(begin, *times) -> when what began then is over: at the first of `times` after it, or with its attempt."""


class Bar(NamedTuple):
    """`begin` and `end` in Unix seconds."""

    kind: str
    begin: float
    end: float
    title: str


class Sign(NamedTuple):
    """`kind`: fault, noticed or back. `time`: Unix seconds."""

    kind: str
    time: float
    title: str


class Lane(NamedTuple):
    name: str
    bars: list[Bar]


class Timeline(NamedTuple):
    """`begin`: Unix seconds; `length` in seconds; `traced`: there are lanes of processes."""

    begin: float
    length: float
    lanes: list[Lane]
    signs: list[Sign]
    traced: bool

    def x(self, time: float) -> float:
        return round(1000 * (time - self.begin) / self.length, 2)

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(bar.kind for lane in self.lanes for bar in lane.bars))

    @property
    def ticks(self) -> list[float]:
        """Seconds since the beginning, at most eight, round ones."""
        return list(_multiples(self.length, next(s for s in _STEPS if self.length / s <= 8)))


_STEPS = [base * 60**power for power in range(4) for base in (1, 2, 5, 10, 15, 30)] + [86400 * 2**n for n in range(20)]


def _multiples(length: float, step: int) -> Iterator[float]:
    return (float(value) for value in range(0, int(length) + 1, step))


def timeline(records: Sequence[Record], trace: Sequence[Mark]) -> Timeline:
    times = [record.time for record in records] + [mark.time for mark in trace] or [0.0]
    length = max(times) - min(times) or 1.0
    ends = sorted(record.time for record in records if isinstance(record.event, AttemptEnded))
    lanes = [Lane("run", list(_run_bars(records))), *_process_lanes(trace, [*ends, max(times)], length)]
    return Timeline(min(times), length, lanes, sorted(_signs(records, trace), key=lambda s: s.time), bool(trace))


def _run_bars(records: Sequence[Record]) -> Iterator[Bar]:
    kept = {record.event.step: record for record in records if isinstance(record.event, StepDone)}
    since = ("start", min((record.time for record in records), default=0.0))  # what goes on, and since when
    for record in records:
        match record.event:
            case AttemptStarted() if since[0] != "start":
                yield from _waited(since, record.time)
                since = ("start", record.time)
            case StateRestored(step=step, seconds=seconds):
                yield from _waited(since, record.time - seconds)
                yield Bar("restore", record.time - seconds, record.time, f"step {step} is restored")
                since = ("unfinished", record.time)
            case StepDone(step=step) as done:
                begin = record.time - done.seconds - done.digest_seconds
                yield from _waited(since, begin)
                lost = kept[step] is not record
                title = f"step {step}, done in attempt {record.attempt}{' and lost with it' if lost else ''}"
                yield Bar("lost" if lost else "step", begin, record.time, title)
                since = ("unfinished", record.time)
            case CheckpointCommitted(step=step):
                yield Bar("commit", record.time, record.time, f"checkpoint of step {step} committed")
            case AttemptEnded(exit_code=code):
                yield from _waited(since, record.time)
                if code != 0 and since[0] == "unfinished":
                    yield Bar("lost", since[1], record.time, "not finished, and lost")
                since = ("down", record.time)


def _waited(since: tuple[str, float], until: float) -> Iterator[Bar]:
    what, begin = since
    if what != "unfinished" and until > begin:
        yield Bar(what, begin, until, "no attempt runs" if what == "down" else "an attempt starts")


def _process_lanes(trace: Sequence[Mark], ends: list[float], length: float) -> Iterator[Lane]:
    """`ends`: when attempts ended, and the last moment of all; no bar crosses one."""

    def cut(begin: float, *others: float) -> float:
        return min([*(time for time in others if time > begin), ends[min(bisect_right(ends, begin), len(ends) - 1)]])

    marks: dict[str, list[Mark]] = {}
    for mark in trace:
        marks.setdefault(mark.process, []).append(mark)
    driver = list(_driver_bars(marks.get("driver", []), cut))
    turns = [bar.begin for bar in driver]
    asked = [bar for bar in driver if bar.kind in _ENGINE_PHASES]
    if not any(name.startswith("engine:") for name in marks) and asked:
        marks["engine"] = []
    for name in sorted(marks, key=_place):
        role = name.partition(":")[0]
        if role == "driver":
            yield Lane(name, driver)
            yield Lane("driver, saves behind", list(_saves(marks[name], cut)))
        elif role == "engine":
            since = marks[name][0].time if marks[name] else 0.0
            yield Lane(name.replace(":", " ") if marks[name] else "engines", [bar for bar in asked if bar.end > since])
        elif any(mark.phase in _RANK_PHASES for mark in marks[name] if mark.phase != "worker.started"):
            yield Lane(name.replace(":", " "), list(_rank_bars(marks[name], turns, cut)))
        else:
            yield Lane(name.replace(":", " "), list(_merged(marks[name], length)))


def _place(name: str) -> tuple[int, str, int]:
    role, _, rank = name.partition(":")
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), role, int(rank or 0))


def _driver_bars(marks: Iterable[Mark], cut: Cut) -> Iterator[Bar]:
    """One thing after the other; answers to single requests do not begin anything."""
    places = [mark for mark in marks if mark.phase in PHASE_OF and mark.phase != "generate.request"]
    for mark, after in _with_next(places):
        kind = PHASE_OF[mark.phase]
        yield Bar(kind, mark.time, cut(mark.time, after), f"{kind}, step {mark.step}")


def _rank_bars(marks: Iterable[Mark], turns: list[float], cut: Cut) -> Iterator[Bar]:
    for mark, after in _with_next([mark for mark in marks if mark.phase in _RANK_PHASES]):
        kind, turn = _RANK_PHASES[mark.phase], bisect_right(turns, mark.time)
        end = cut(mark.time, after, *turns[turn : turn + 1])
        yield Bar(kind, mark.time, end, f"{kind}, step {mark.step}")


def _saves(marks: Iterable[Mark], cut: Cut) -> Iterator[Bar]:
    committed = [mark for mark in marks if mark.phase == "save.committed"]
    for mark in marks:
        if mark.phase == "save.write":
            done = [other.time for other in committed if other.step == mark.step]
            yield Bar("save", mark.time, cut(mark.time, *done), f"checkpoint of step {mark.step} is written")


def _merged(marks: Sequence[Mark], length: float) -> Iterator[Bar]:
    group: list[Mark] = []
    for mark in [*marks, None]:
        if group and (mark is None or mark.time - group[-1].time > _MERGED * length):
            places = ", ".join(dict.fromkeys(one.phase for one in group))
            yield Bar(
                "background", group[0].time, group[-1].time, f"{places}: {len(group)} times, step {group[0].step}"
            )
            group = []
        if mark is not None:
            group.append(mark)


def _with_next(marks: list[Mark]) -> Iterator[tuple[Mark, float]]:
    for mark, after in zip_longest(marks, marks[1:]):
        yield mark, after.time if after else math.inf


def _signs(records: Sequence[Record], trace: Sequence[Mark]) -> Iterator[Sign]:
    ended = {}
    for record in records:
        match record.event:
            case HangDetected(phase=phase, step=step):
                yield Sign("noticed", record.time, f"hang noticed: {phase}, step {step}")
            case EngineLost(engine=engine, reason=reason):
                yield Sign("noticed", record.time, f"engine {engine} is lost: {reason}")
            case EngineServing(url=url):
                yield Sign("back", record.time, f"the engine at {url} serves again")
            case AttemptEnded(exit_code=code, reason=reason) if code != 0:
                ended[record.attempt] = record.time
                yield Sign("noticed", record.time, f"attempt {record.attempt} has ended: {reason}")
    for record in records:
        if isinstance(record.event, FaultWitnessed):
            time = struck(record, records, trace)
            fault = f"fault {record.event.index + 1}: {record.event.fault} {record.event.target}"
            yield Sign("fault", time or min(record.time, ended.get(record.attempt, record.time)), fault)
    for recovery in recoveries(records):
        if recovery.seconds_down is not None:
            back = f"back after the death of attempt {recovery.attempt}: a step is done"
            yield Sign("back", ended[recovery.attempt] + recovery.seconds_down, back)
