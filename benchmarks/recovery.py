"""How soon a run is back: one run that loses an engine, a rank, its driver, and everything, against its own cold start.

Every time is from the moment of the loss to the end of the first step done after it. A cold start is the same command
with nothing running: engine, driver, Ray and ranks are started, and the newest checkpoint is restored.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.profile import Profile
from benchmarks.report import Figure
from benchmarks.steps import run_config
from chaos.directory import PlanDirectory
from chaos.plan import PlannedFault
from chaos.recovery import parts, struck
from checkpointing.events import AttemptEnded, EngineLost, EngineServing, Event, FaultWitnessed, StepDone
from checkpointing.journal import JournalFollower, Record, read_journal
from checkpointing.trace import Mark, read_trace, trace_folder
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.faulted import write_plan
from harness.proxies import WatchedEngines
from harness.supervisor import supervise

STEPS = 22
LOSSES = {
    "an engine": ("engine:0", "generate.request", (5, 11)),
    "a rank": ("policy:1", "train.forward_backward", (7, 13)),
    "the driver": ("driver", "generate.begin", (9, 15)),
}
"""{what is killed: (its name, at which place, in which steps)}"""
TARGETS = {"an engine": None, "a rank": 0.5, "the driver": 0.6}
BROKEN_UP_TO = 17
"""The step after which everything is lost for the second time."""


class _Enough(Exception):
    pass


def recovery(profile: Profile) -> Iterator[Figure]:
    with profile.folder("recovery") as folder:
        config = run_config(folder, STEPS, ckpt_interval=1)
        _run(config, folder, until=3)
        cold = [_first_step_after(config, time.time(), lambda: _run(config, folder, until=BROKEN_UP_TO, losses=True))]
        cold.append(_first_step_after(config, time.time(), lambda: _run(config, folder, until=STEPS)))
        records, trace = read_journal(config.run_dir), read_trace(trace_folder(config.run_dir))
    whole = statistics.mean(cold)
    for what, (target, _, steps) in LOSSES.items():
        hits = [_when(records, trace, target, step) for step in steps]
        back = [_next_step(records, hit) - hit for hit in hits]
        note = _split(records, trace, hits)
        yield Figure("recovery", f"{what} lost / a cold start", TARGETS[what], back, [whole] * len(back), note=note)
    yield _engine_alone(records, [_when(records, trace, "engine:0", step) for step in LOSSES["an engine"][2]])


def _run(config: RunConfig, folder: Path, until: int, losses: bool = False) -> None:
    """Run up to step `until`, then lose everything at once: supervisor, driver, ranks, engine."""
    steps = JournalFollower(config.run_dir)

    def watch() -> None:
        if until < STEPS and any(event.step >= until for event in _events(steps.new(), StepDone)):
            raise _Enough

    planned = tuple(
        PlannedFault(fault="kill", target=target, at=at, step=step)
        for target, at, broken in LOSSES.values()
        for step in broken
    )
    plan = write_plan(config, planned, folder / "faults") if losses else None
    with EnginePool(config, folder) as pool:
        engines = WatchedEngines(config, folder, pool.engines, directory=PlanDirectory(folder / "faults"), proxies={})
        with suppress(_Enough):
            supervise(config, engines if plan else pool, plan, watch)


def _first_step_after(config: RunConfig, began: float, run: Callable[[], None]) -> float:
    """Seconds from now until the first step that `run` does."""
    run()
    return _next_step(read_journal(config.run_dir), began) - began


def _when(records: Sequence[Record], trace: Sequence[Mark], target: str, step: int) -> float:
    for record in records:
        event = record.event
        if isinstance(event, FaultWitnessed) and (event.target, event.step) == (target, step):
            when = struck(record, records, trace)
            if when is not None:
                return when
    raise RuntimeError(f"{target} was not seen to be killed at step {step}: nothing was measured")


def _next_step(records: Sequence[Record], when: float) -> float:
    return next(record.time for record in records if isinstance(record.event, StepDone) and record.time > when)


def _split(records: Sequence[Record], trace: Sequence[Mark], hits: Sequence[float]) -> str:
    """What the last of the recoveries consisted of, in seconds; nothing where no attempt ended."""
    ended = [record for record in records if isinstance(record.event, AttemptEnded) and record.time > hits[-1]]
    back = _next_step(records, hits[-1])
    if not ended or ended[0].time > back:
        return ""
    return ", ".join(f"{part.name} {part.end - part.begin:.1f}" for part in parts(records, ended[0].attempt, trace))


def _engine_alone(records: Sequence[Record], hits: Sequence[float]) -> Figure:
    """Training time lost with an engine, over the time that the engine itself takes to be back."""
    usual = statistics.median(event.seconds for event in _events(records, StepDone))
    lost = [_next_step(records, hit) - hit - usual for hit in hits]
    down = [record.time for record in records if isinstance(record.event, EngineLost)]
    up = [record.time for record in records if isinstance(record.event, EngineServing)]
    own = [end - begin for begin, end in zip(down, up, strict=True)]
    note = "of a step that stood still, less a usual step"
    return Figure("recovery", "training time lost with an engine / its own restart", 1.1, lost, own, note=note)


def _events[E: Event](records: Sequence[Record], kind: type[E]) -> list[E]:
    return [record.event for record in records if isinstance(record.event, kind)]
