"""A driver that trains: SkyRL's loop in a few lines, everything around it the product's own.

Its State is a chain of digests, one link a step, so that whoever holds the wrong one shows it for ever after.
"""

import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray.exceptions

from checkpointing.blobs import get_blob, put_blob
from checkpointing.canonical import digest
from checkpointing.errors import (
    CorruptBlob,
    DivergenceError,
    HarnessError,
    NonFinite,
    Preempted,
    StepsMissing,
    WorkerLost,
)
from checkpointing.events import RunFinished, StateRestored, StepDone
from checkpointing.generations import delete_generations
from checkpointing.manifest import Entry, Shard
from checkpointing.phases import reached
from checkpointing.progress import ProgressFile
from checkpointing.settings import Checkpoints
from checkpointing.store import Store
from checkpointing.tiers import Tiers
from trainer.run import Refusal, Run, open_run
from trainer.saving import Saver
from trainer.steps import _require_same
from trainer.stopping import Stopping
from trainer.upkeep import Replicas

from .disk import RUN, Path
from .waiting import Future
from .world import World

ROLE, PARAMETERS, POSITION = "policy", "policy/parameters", "driver/position"


def state_after(step: int) -> str:
    """What a run holds after `step` steps, if nothing has gone wrong."""
    state = "begun"
    for number in range(1, step + 1):
        state = digest(f"{state} {number}".encode())
    return state


class Held(NamedTuple):
    """What one rank has copied for a save: {entry: (tensors, data)}."""

    role: str
    rank: int
    step: int
    parts: dict[str, tuple[bytes | None, bytes]]


def write_held(held: Held, stores: Sequence[Store]) -> dict[str, Shard]:
    """As `write_staged`, for what is no shared memory."""
    written = {}
    for entry, (tensors, data) in held.parts.items():
        for store in stores:
            stored = tensors and put_blob(store, tensors), put_blob(store, data)
        digests = {"w": digest(tensors)} if tensors else {}
        written[entry] = Shard(rank=held.rank, tensors=stored[0] or None, data=stored[1], tensor_digests=digests)
        reached("save.shard_written", role=held.role, rank=held.rank, step=held.step, entry=entry)
    return written


class Keeper:
    """A process that writes what ranks have copied; called as an actor of Ray is."""

    def __init__(self, world: World, urls: list[str]) -> None:
        self._world = world
        self._process = world.start("keeper", self._serve, world.clock.current.process)
        self._tiers = Tiers.open(urls)
        self.write = SimpleNamespace(remote=partial(self._call, self._write))

    def _serve(self) -> int:
        self._world.clock.wait(lambda: False)
        return 0

    def _write(self, held: Held) -> dict[str, Shard]:
        return write_held(held, [self._tiers.primary.store])

    def _call(self, method: Callable[..., Any], *args: Any) -> Future:
        clock = self._world.clock
        future = Future(clock, self._process, ray.exceptions.RayActorError)
        if self._process.code is None:
            clock.start(self._process, partial(future.work, method, *args))
        return future


class Training:
    """What a `Saver` needs of a trainer, and the step loop."""

    def __init__(self, world: World, run: Run, stopping: Stopping) -> None:
        self._world, self.run, self._stopping = world, run, stopping
        self._schedule = world.schedule
        self._process = world.clock.current.process
        self.cfg = SimpleNamespace(trainer=None)
        self.nodes = {ROLE: ["node"] * self._schedule.ranks}
        self.state, self.global_step = state_after(0), 0
        self.start_keepers()
        self.saver = Saver(self, run)

    def start_keepers(self) -> None:
        self.keepers = {"node": Keeper(self._world, self.run.urls)}

    def groups(self) -> dict[str, Any]:
        actors = [
            SimpleNamespace(stage_state=SimpleNamespace(remote=partial(self._stage, rank)))
            for rank in range(self._schedule.ranks)
        ]
        return {ROLE: SimpleNamespace(_actor_handlers=actors)}

    def _stage(self, rank: int, step: int) -> Future:
        future = Future(self._world.clock, self._process, ray.exceptions.RayActorError)
        future.work(lambda: Held(ROLE, rank, step, {PARAMETERS: self._part(rank)}))
        return future

    def _part(self, rank: int) -> tuple[bytes, bytes]:
        # Some bytes are shared by all steps, and some by a few that are not neighbours.
        return f"{self.state} of {rank}".encode(), b"%d" % (self.global_step % 3)

    def stage_driver(self, step: int) -> Held:
        return Held("driver", 0, step, {POSITION: (None, b"%d" % step)})

    def entries(self) -> dict[str, Entry]:
        shards = []
        for rank in range(self._schedule.ranks):
            tensors, data = self._part(rank)
            shards.append((rank, tensors, data))
        return {PARAMETERS: Entry.of(PARAMETERS, [_digested(*shard) for shard in shards])}

    def restore(self) -> None:
        reached("restore.begin", step=self.run.resumed_step)
        while self.run.resumed is not None and (refusals := self._fetch()):
            self._world.model.given_up(self.run.resumed[0].key)
            self._process.chose_at = self._world.clock.now
            self.run.fall_back(refusals)
            self._process.attempt = self.run.attempt.attempt
        if self.run.resumed is None:
            return
        commit, manifest = self.run.resumed
        self._world.model.restored(commit.key, self._found, self._expected(manifest.step))
        self.global_step, self.state = manifest.step, state_after(manifest.step)
        digests = {name: entry.digest for name, entry in manifest.entries.items()}
        self.run.journal.append(StateRestored(step=manifest.step, entries=digests, seconds=0.0))
        reached("restore.end", step=manifest.step)

    def _fetch(self) -> list[Refusal]:
        assert self.run.resumed is not None
        self._found = {}
        try:
            for name, entry in self.run.resumed[1].entries.items():
                for shard in entry.shards:
                    tensors = get_blob(self.run.tiers, shard.tensors) if shard.tensors else None
                    assert shard.data is not None
                    self._found[name, shard.rank] = tensors, get_blob(self.run.tiers, shard.data)
        except CorruptBlob as error:
            return [Refusal(ROLE, 0, str(error))]
        return []

    def _expected(self, step: int) -> dict[tuple[str, int], tuple[bytes | None, bytes]]:
        self.global_step, self.state = step, state_after(step)
        parts = {(PARAMETERS, rank): self._part(rank) for rank in range(self._schedule.ranks)}
        return {**parts, (POSITION, 0): (None, b"%d" % step)}

    def train(self) -> None:
        planned = self._schedule.steps
        while self.global_step < planned:
            step = self.global_step + 1
            for phase in ("generate.begin", "reward.begin", "forward.begin", "train.begin"):
                self._go_through(phase, step)
            self.state, self.global_step = digest(f"{self.state} {step}".encode()), step
            self._step_ends(step)
            if step % self._schedule.every == 0 or step == planned:
                self.saver.save(step, self.entries(), last=step == planned)
            self.saver.remember(step, self.entries())
            self._go_through("weight_sync.begin", step)
            reached("weight_sync.end", step=step)
        if self.state != state_after(planned):
            raise DivergenceError("the run has ended in another state than one without faults")

    def _go_through(self, phase: str, step: int) -> None:
        reached(phase, step=step)
        poison(self._world, phase, step)
        self._world.clock.sleep(self._world.rng.uniform(0.2, 2.0))
        if self._world.rank_lost:
            self._world.rank_lost = False
            raise WorkerLost(f"policy rank 0 died at step {step}")

    def _step_ends(self, step: int) -> None:
        self.saver.report()
        poison(self._world, "step.trained", step)
        state = {name: entry.digest for name, entry in self.entries().items()}
        done = StepDone(
            step=step, epoch=0, seconds=1.0, digest_seconds=0.0, state=state, data={}, scalars={}, zero_advantages=False
        )
        self.run.journal.append(done)
        if step in self.run.steps_before:
            _require_same(self.run.steps_before[step], done)
        reached("step.trained", step=step)


def _digested(rank: int, tensors: bytes, data: bytes) -> Shard:
    from checkpointing.blobs import Blob

    return Shard(rank=rank, tensors=Blob.of(tensors), data=Blob.of(data), tensor_digests={"w": digest(tensors)})


def poison(world: World, phase: str, step: int) -> None:
    """Fail here if the schedule says so."""
    match world.poisoned(phase, step):
        case "kill driver":
            world.kill(world.clock.current.process)
        case "rank lost":
            raise WorkerLost(f"policy rank 0 died at step {step}")
        case "freeze":
            world.clock.pause(world.clock.current.process)
            world.clock.sleep(0.0)
        case "non-finite":
            raise NonFinite(f"step {step}: loss is NaN")


def drive(world: World, checkpoints: Checkpoints) -> int:
    """What the driver process does, from its start to its end. Raises HarnessError."""
    process = world.clock.current.process
    process.watchers.append(ProgressFile(Path(process.env["HARNESS_PROGRESS"])).hear)
    stopping = Stopping()
    process.watchers.append(stopping._leave)
    process.signals[signal.SIGTERM] = partial(_told_to_stop, world, stopping)
    reached("driver.started", role="driver", attempt=int(process.env["HARNESS_ATTEMPT"]), pid=process.pid)
    world.model.unusable.update(json.loads(process.env["HARNESS_UNUSABLE"]))
    process.chose_at = world.clock.now
    cfg = SimpleNamespace(trainer=SimpleNamespace(seed=world.schedule.seed, resume_mode="latest"))
    run = open_run(Path(RUN), checkpoints, cfg, "dataset", world.schedule.steps)
    process.attempt = run.attempt.attempt
    reached("attempt.opened", attempt=process.attempt)
    poison(world, "attempt.opened", 0)
    replicas, last = Replicas(), run.resumed_step
    if last < world.schedule.steps:
        training = Training(world, run, stopping)
        try:
            stopping._training = True
            training.restore()
            replicas.start(run)
            training.train()
        except Exception as error:
            if stopping.asked:
                raise _stopped(error, training) from error
            training.saver.abandon()
            raise
        if training.global_step != world.schedule.steps:
            raise StepsMissing("planned more")
        reached("finish.begin", step=training.global_step)
        training.saver.finish()
        last = training.global_step
    if stopping.asked:
        raise Preempted("stopped as asked")
    replicas.finish(run)
    delete_generations(Path(RUN))
    run.journal.append(RunFinished(planned_steps=world.schedule.steps, last_step=last))
    return 0


def _told_to_stop(world: World, stopping: Stopping) -> None:
    stopping.asked = True
    if not stopping._training and (driver := world.living("driver")) is not None:
        driver.words = "error: stopped as asked before training began"
        driver.end(Preempted.exit_code)


def _stopped(error: Exception, training: Training) -> HarnessError:
    if isinstance(error, HarnessError) and not isinstance(error, Preempted | WorkerLost):
        return error
    try:
        training.saver.last()
    except HarnessError as failed:
        return Preempted(f"stopped as asked; the last step could not be saved: {failed}")
    return Preempted("stopped as asked")
