"""One schedule: a supervisor and whoever starts it again, from the first attempt until the run is complete."""

import contextlib
import json
import signal
import subprocess
import sys
import uuid
from types import SimpleNamespace
from typing import Any

import ray.exceptions

import harness.stopping
import harness.supervisor
import trainer.run
import trainer.saving
import trainer.upkeep
from checkpointing.errors import (
    AttemptsExhausted,
    CheckpointError,
    Fenced,
    NonFinite,
    NoProgress,
    Poisoned,
    Preempted,
    StoreError,
)
from checkpointing.events import AttemptEnded, RunStopped, StepDone
from checkpointing.journal import read_journal
from checkpointing.progress import OUTSIDE_STEPS, progress_path
from checkpointing.replication import repair
from checkpointing.replicator import Job, work
from checkpointing.settings import Checkpoints
from checkpointing.tiers import Tiers
from checkpointing.verification import check
from harness.config import RunConfig, Supervision
from harness.policy import HOUR, NO_PROGRESS

from .clock import Process, Stuck
from .disk import RUN, Path
from .faults import Schedule
from .invariants import Violation
from .mutations import Mutation
from .trainer import Training, drive, write_held
from .waiting import Executor
from .world import World

MOST_STARTS = 9
"""Times that a supervisor is started until nothing more goes wrong; then it has `CALM_STARTS` to finish the run."""
CALM_STARTS = 3

HOPELESS_STARTS = 2
"""Times that a supervisor gives up in the same way before whoever starts it does too, where a step always fails."""

LOOK_SECONDS = 2.0
GAVE_UP = {error.exit_code for error in (AttemptsExhausted, NoProgress, Poisoned, NonFinite)}


class Simulation:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.world = schedule, World(schedule)
        urls = tuple("file://" if tier == "file" else f"s3://{World.bucket_of(tier)}/run" for tier in schedule.tiers)
        self.checkpoints = Checkpoints(
            tiers=urls,
            keep=schedule.keep,
            when_busy="wait" if schedule.wait_when_busy else "skip",
            backlog=schedule.backlog,
            drain_seconds=300.0,
        )
        self.config = RunConfig(
            run_dir=Path(RUN),
            supervision=Supervision(
                restarts_per_hour=schedule.restarts_per_hour,
                poison_after=schedule.poison_after,
                on_non_finite="restore" if schedule.restore_non_finite else "stop",
                phase_seconds=30.0,
                wide_seconds=400.0,
                grace_seconds=200.0,
            ),
            checkpoints=self.checkpoints,
            skyrl={},
        )
        self.driver: Process | None = None

    def run(self, mutation: Mutation | None = None) -> None:
        """`mutation`: a defect to plant. Raises Violation or Stuck, or what product code should never have raised."""
        with self.world.installed() as patched:
            for module, names in self._replaced().items():
                for name, value in names.items():
                    patched.setattr(module, name, value)
            if mutation is not None:
                mutation(patched, self.world)
            self.world.start("operator", self._operate, None)
            self.world.clock.run()

    def _operate(self) -> int:
        codes = []
        for start in range(MOST_STARTS + CALM_STARTS):
            calm = start >= MOST_STARTS
            if calm:
                self.world.heal()
            supervisor = self.world.start("supervisor", self._supervise, None)
            Child(self.world, supervisor).wait()
            self._reap()
            codes.append(supervisor.code)
            if supervisor.code == 0:
                break
            self._judge(supervisor, calm)
            if self._can_never_end and codes.count(supervisor.code) > HOPELESS_STARTS:
                break
            Path(f"{RUN}/stop").unlink(missing_ok=True)
            self.world.clock.sleep(HOUR if calm else self.world.rng.uniform(0.5, 60.0))
            if supervisor.code in (CheckpointError.exit_code, StoreError.exit_code) or calm:
                self._repair()
        self._last_look(codes)
        self.world.clock.stop()
        return 0

    @property
    def _can_never_end(self) -> bool:
        return self.schedule.poison is not None and self.schedule.poison.times == 0

    def _judge(self, supervisor: Process, calm: bool) -> None:
        """May the supervisor have ended as it did?"""
        code, world = supervisor.code or 0, self.world
        may = GAVE_UP | {Preempted.exit_code, StoreError.exit_code}
        if calm:
            may = GAVE_UP if self._can_never_end else set()
        if any(fault.kind in ("cut off", "late") for fault in self.schedule.faults) and not calm:
            # What slept before it claimed its attempt may wake up just before its successor claims the same one.
            may.add(Fenced.exit_code)
        if world.model.hurt or self.schedule.poison:
            may.add(CheckpointError.exit_code)
        if code >= 0 and code not in may:
            raise Violation(f"progress: the run ended with {code}: {supervisor.words}")

    def _last_look(self, codes: list[int | None]) -> None:
        world = self.world
        complete = codes[-1] == 0
        if not complete and not self._can_never_end:
            raise Violation(f"progress: nothing goes wrong any more, and the run does not end: {codes}")
        world.heal()
        tiers = self.checkpoints.open(Path(RUN))
        if complete:
            newest = world.model.newest_whole()
            if newest is None or newest.step != self.schedule.steps:
                raise Violation(f"progress: the run is complete, and its newest checkpoint is {newest}")
            last = self.schedule.tiers[-1]
            if not world.model.hurt and not world.model.is_whole(newest, last):
                raise Violation(f"progress: the run is complete, and {newest.key} is not whole on {last}")
        if not world.model.hurt and world.model.history:
            found = check(tiers, read_data=True)
            if found.exit_code != 0:
                raise Violation(f"`harness check` finds damage that nobody did: {found}")
        self._policy_was_kept()

    def _policy_was_kept(self) -> None:
        """That nothing was tried more often than it may be, counted here from what the supervisor said."""
        alike: list[tuple[Any, ...]] = []
        best, stalled, times = 0, 0, list[float]()
        limits = self.config.supervision
        jumped = any(fault.kind == "clock" for fault in self.schedule.faults)
        for record in read_journal(Path(RUN)):
            match record.event:
                case StepDone(step=step) if step > best:
                    best, stalled = step, -1
                case RunStopped():
                    alike, stalled, times = [], 0, []
                case AttemptEnded() as ended if ended.exit_code not in (0, Preempted.exit_code):
                    place = (ended.exit_code, ended.signal, ended.step, ended.phase)
                    alike = [*alike, place] if alike and alike[-1] == place else [place]
                    stalled += 1
                    times = [one for one in times if record.time - one < HOUR] + [record.time]
                    most = limits.poison_after + 1
                    if ended.exit_code == NonFinite.exit_code:
                        most = 2 if limits.on_non_finite == "restore" else 1
                    if len(alike) > most and ended.phase not in OUTSIDE_STEPS | {None}:
                        raise Violation(f"policy: {place} happened {len(alike)} times in a row")
                    if stalled > NO_PROGRESS:
                        raise Violation(f"policy: {stalled} attempts in a row got no further")
                    if len(times) > limits.restarts_per_hour + 1 and not jumped:
                        raise Violation(f"policy: {len(times)} attempts failed within an hour")

    def _repair(self) -> None:
        """What `harness repair` does, on every tier."""
        tiers = self.checkpoints.open(Path(RUN))
        with contextlib.suppress(StoreError):
            for tier in tiers.durable:
                repair(Tiers(tiers.all), tier, read_data=True)

    # The supervisor's surroundings

    def _supervise(self) -> int:
        nothing = {name: lambda *_: None for name in ("start_missing", "wrong", "end_silent", "end_all")}
        engines: Any = SimpleNamespace(urls=[], log_paths=None, starting=False, returned=lambda: [], **nothing)
        with harness.stopping.StopRequest(Path(RUN), self.config.supervision.grace_seconds) as stop:
            harness.supervisor._Supervisor(self.config, engines, None, lambda: None, stop).run()
        return 0

    def _start_driver(
        self, config: RunConfig, urls: list[str], attempt: int, faults: None, unusable: dict[str, str]
    ) -> Any:
        env = {
            "HARNESS_ATTEMPT": str(attempt),
            "HARNESS_PROGRESS": str(progress_path(config.run_dir, attempt)),
            "HARNESS_UNUSABLE": json.dumps(unusable),
        }
        for bucket in self.world.buckets.values():
            bucket.was_away = False
        parent = self.world.clock.current.process
        self.driver = self.world.start("driver", lambda: drive(self.world, self.checkpoints), parent, env)
        return Child(self.world, self.driver)

    def _reap(self, *_: Any) -> list[str]:
        for process in self.world.processes:
            if process.name == "driver":
                self.world.kill(process, everyone=True)
        return []

    def _popen(self, command: list[str], **_: Any) -> Any:
        job = Job.model_validate_json(command[-1]).model_copy(update={"run_dir": Path(RUN)})

        def replicate() -> int:
            self.world.clock.current.process.attempt = job.attempt
            return work(job)

        return Child(self.world, self.world.start("replicator", replicate, self.world.clock.current.process))

    def _replaced(self) -> dict[Any, dict[str, Any]]:
        world = self.world
        time = world.time
        processes = SimpleNamespace(
            Popen=self._popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        stood_in = SimpleNamespace(
            get=lambda calls: [one.result() for one in calls] if isinstance(calls, list) else calls.result(),
            wait=lambda calls, num_returns: [world.clock.wait(one.done) for one in calls],
            exceptions=ray.exceptions,
        )
        return {
            harness.stopping: {"time": time},
            harness.supervisor: {
                "time": time,
                "LOOK_SECONDS": LOOK_SECONDS,
                "start_driver": self._start_driver,
                "reap": self._reap,
                "last_words": lambda _: self.driver.words if self.driver else "",
                "last_lines": lambda _: [],
                "first_dead": lambda words, log, scratch: log,
                "scratch_of": lambda ledger: ledger,
                "oom_kills": lambda: 0,
                "LogStream": lambda *_: SimpleNamespace(begin=lambda _: None, look=lambda: None, end=lambda: None),
                "leave_config": lambda *_: None,
                "is_recorded": lambda _: True,
                "says_error": lambda *_: True,
                "shutil": SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=1 << 50)),
            },
            trainer.run: {
                "os": world.system,
                "uuid": SimpleNamespace(uuid4=lambda: uuid.UUID(int=self.schedule.seed)),
                "identity": lambda cfg, dataset: {"config": "c0ffee", "dataset": dataset},
                "topology": lambda cfg: {"policy": self.schedule.ranks},
                "package_versions": dict,
                "provenance": dict,
                "get_config_as_dict": lambda cfg: {},
            },
            trainer.saving: {
                "ray": stood_in,
                "time": time,
                "ThreadPoolExecutor": lambda workers, **_: Executor(world.clock, workers),
                "StagingBuffer": SimpleNamespace,
                "groups": Training.groups,
                "entries_of": lambda *_: [],
                "stage_entries": lambda entries, training, buffer, rank, step: training.stage_driver(step),
                "write_staged": write_held,
            },
            trainer.upkeep: {"os": world.system, "subprocess": processes, "sys": sys},
        }


class Child:
    """A process as its parent has it, as far as product code uses `subprocess.Popen`."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def poll(self) -> int | None:
        return -signal.SIGKILL if self._process.code is None and self._process.given_up else self._process.code

    def kill(self) -> None:
        self._world.kill(self._process)

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        if not self._process.out_of_reach and number in self._process.signals:
            self._process.signals[number]()

    def wait(self, timeout: float | None = None) -> int:
        """A process on a node that is cut off counts as killed: nobody can wait for it."""
        gone = self._world.clock.wait(lambda: self._process.code is not None or self._process.out_of_reach, timeout)
        if not gone:
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return -signal.SIGKILL if self._process.code is None else self._process.code


__all__ = ["Simulation", "Stuck", "Violation"]
