"""A save, seen from the driver: training stops while the State is copied, and everything else happens behind it.

stop    every rank copies its entries into its staging buffer, the driver its own            `Saver.save`
behind  keepers hash and write what ranks staged -> driver writes its own -> manifest -> commit   `Saver._write`

One save is in flight at most, as there is one buffer per rank. A save that failed is reported at the next step and
tried again from the same buffers, unless a newer one is due by then.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray

from checkpointing.commit import commit
from checkpointing.errors import DivergenceError, StoreError
from checkpointing.events import CheckpointCommitted, RetentionFailed, SaveFailed, SaveSkipped
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.phases import reached
from checkpointing.staging import Staged, StagingBuffer, write_staged
from trainer.dead import DEAD
from trainer.groups import groups
from trainer.run import Run
from trainer.staging import stage_entries
from trainer.state import entries_of
from trainer.upkeep import Upkeep

ABANDON_AFTER = 120.0
"""Seconds that a failed attempt still waits for a save; storage may be what has failed."""

_log = logging.getLogger(__name__)


@dataclass
class _Save:
    """One checkpoint on its way. `expected`: what the step left behind, by entry, as far as it was digested."""

    step: int
    ranks: list[tuple[str, Staged]]
    """(node, what a rank there has staged)"""
    driver: Staged
    expected: dict[str, Entry]
    started: float
    stopped_seconds: float


class Saver:
    """Saves the State of `trainer` into `run`. Call `report` once a step, and `finish` before the process may end."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer, self._run = trainer, run
        self._buffer, self._spare = StagingBuffer(), StagingBuffer()
        self._remembered: _Save | None = None
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._in_flight: tuple[_Save, Future[None]] | None = None
        self._failures = 0
        self._failing_since = 0.0
        self._stopped_seconds = 0.0
        self._upkeep = Upkeep(run)

    def save(self, step: int, expected: dict[str, Entry], last: bool) -> None:
        """Copy the State and return; the commit follows. `last`: nothing is trained after it, so it is never skipped.

        Raises:
            StoreError: too many saves in a row have failed, for too long.
            Fenced: a newer attempt of this run exists.
        """
        if self._in_flight and not self._in_flight[1].done() and not last and self._run.settings.when_busy == "skip":
            self._run.journal.append(SaveSkipped(step=step, in_flight=self._in_flight[0].step))
            return
        reached("save.wait", step=step)
        self._settle()
        self._in_flight = None  # if it failed, a newer checkpoint takes its place
        started = time.monotonic()
        reached("save.begin", step=step)
        calls = self._ask_ranks_to_stage(step)
        driver = self._stage_driver(self._buffer, step)
        ranks = [(node, ray.get(call)) for node, call in calls]
        self._stopped_seconds = time.monotonic() - started
        self._submit(_Save(step, ranks, driver, expected, started, self._stopped_seconds))

    def _ask_ranks_to_stage(self, step: int) -> list[tuple[str, Any]]:
        return [
            (node, actor.stage_state.remote(step))
            for role, group in groups(self._trainer).items()
            for actor, node in zip(group._actor_handlers, self._trainer.nodes[role], strict=True)
        ]

    def _stage_driver(self, buffer: StagingBuffer, step: int) -> Staged:
        return stage_entries(entries_of("driver", self._trainer.cfg.trainer), self._trainer, buffer, 0, step)

    def remember(self, step: int, expected: dict[str, Entry]) -> None:
        """Copy what the driver holds after `step`, which is little, so that `last` can still save it: the next step
        moves it at once. What ranks hold stays as it is until that step's optimizer."""
        self._remembered = _Save(step, [], self._stage_driver(self._spare, step), expected, time.monotonic(), 0.0)

    def last(self) -> int:
        """Asked to stop: commit the save in flight, and the last finished step if it is not saved. Returns the step of
        the newest checkpoint, 0 if there is none.

        Raises:
            DivergenceError: ranks have moved on from that step; nothing of it was committed.
            StoreError, Fenced: as `save`.
        """
        in_flight = self._in_flight[0].step if self._in_flight else 0
        self._drain(hurry=True)
        save = self._remembered
        if save is not None and save.step > max(self.newest, in_flight):
            ranks = [(node, ray.get(call)) for node, call in self._ask_ranks_to_stage(save.step)]
            self._submit(replace(save, ranks=ranks))
            self._drain(hurry=True)
        return self.newest

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that this attempt made or resumed from, 0 if there is none."""
        return self._run.parent.step if self._run.parent else 0

    def report(self) -> None:
        """Notice how the save in flight went; try it again if it failed. Raises like `save`."""
        if self._in_flight and self._in_flight[1].done() and not self._settle():
            self._submit(self._in_flight[0])

    def finish(self) -> None:
        """Wait until nothing is in flight, trying again what failed. Raises like `save`."""
        self._drain()
        self._keep_in_memory(frozenset())  # it is for the processes of a run that goes on

    def _drain(self, hurry: bool = False) -> None:
        while self._in_flight and not self._settle(hurry):
            time.sleep(min(2.0**self._failures, 30.0))
            self._submit(self._in_flight[0])

    def abandon(self) -> bool:
        """Training has failed: let the save in flight end, well or not, since its State was copied before. False if it
        did not end in time: as long as it may still commit, nothing can take its place in this process.

        Raises:
            DivergenceError: what was staged is not what the step left behind.
        """
        if self._in_flight:
            save, future = self._in_flight
            try:
                future.result(ABANDON_AFTER)
            except TimeoutError:
                _log.warning("the save of step %d has not ended after %.0f s", save.step, ABANDON_AFTER)
                return False
            except DivergenceError:
                raise
            except Exception as error:
                self._failures += 1
                self._say_failed(save, error)
        return True

    def close(self) -> None:
        """Nothing more will be saved."""
        self._behind.shutdown(wait=False)

    def metrics(self) -> dict[str, float]:
        """For the run's own loggers: steps on the first and on the last durable tier, and what to raise an alarm on."""
        return {
            "checkpoint/local_step": self._upkeep.local_step,
            "checkpoint/durable_step": self._upkeep.durable_step,
            "checkpoint/lag_steps": self._upkeep.local_step - self._upkeep.durable_step,
            "checkpoint/failed_saves": self._failures,
            "checkpoint/stopped_seconds": self._stopped_seconds,
        }

    def _submit(self, save: _Save) -> None:
        self._in_flight = (save, self._behind.submit(self._write, save))

    def _settle(self, hurry: bool = False) -> bool:
        """Wait for the save in flight. True if there is nothing to try again.

        Raises StoreError: `failed_saves` in a row have failed, for `failing_seconds`, which nobody has in a `hurry`.
        """
        if self._in_flight is None:
            return True
        save, future = self._in_flight
        try:
            future.result()
        except (StoreError, *DEAD) as error:
            self._failing_since = self._failing_since if self._failures else time.monotonic()
            self._failures += 1
            reason = self._say_failed(save, error)
            settings, waited = self._run.settings, time.monotonic() - self._failing_since
            if self._failures >= settings.failed_saves and (hurry or waited >= settings.failing_seconds):
                raise StoreError(f"{self._failures} saves in a row failed, the last: {reason}") from error
            if not isinstance(error, StoreError):
                self._trainer.start_keepers()
            return False
        self._failures, self._in_flight = 0, None
        return True

    def _say_failed(self, save: _Save, error: Exception) -> str:
        # Of an error in a keeper Ray shows the whole traceback; `cause` is the error itself.
        reason = f"a keeper died: {error}" if isinstance(error, DEAD) else str(getattr(error, "cause", error))
        self._run.journal.append(SaveFailed(step=save.step, failures=self._failures, reason=reason))
        _log.warning("the save of step %d failed: %s", save.step, reason)
        return reason

    def _write(self, save: _Save) -> None:
        """Runs in a thread of its own, next to training. A save that is a commit already is not made again."""
        reached("save.write", step=save.step)
        run = self._run
        if run.parent is None or (run.parent.step, run.parent.attempt) != (save.step, run.attempt.attempt):
            self._commit(save)
        self._tidy(save.step)
        reached("save.committed", step=save.step)

    def _commit(self, save: _Save) -> None:
        run = self._run
        entries = {name: Entry.of(name, shards) for name, shards in self._gather(save).items()}
        for name, entry in entries.items():
            before = save.expected.get(name)
            if before is not None and before.digest != entry.digest:
                raise DivergenceError(f"step {save.step}: what was staged of {name} is not what the step left behind")
        manifest = Manifest(step=save.step, topology=run.topology, entries=entries, run=run.identity)
        committed = commit(run.tiers.primary.store, run.attempt, manifest, run.parent, run.signer)
        blobs = frozenset(manifest.blobs())
        run.journal.append(
            CheckpointCommitted(
                step=save.step,
                commit=committed.key,
                bytes_total=sum(blob.size for blob in blobs),
                bytes_new=sum(blob.size for blob in blobs - run.parent_blobs),
                stopped_seconds=save.stopped_seconds,
                seconds=time.monotonic() - save.started,
            )
        )
        run.parent, run.parent_blobs = committed, blobs

    def _gather(self, save: _Save) -> dict[str, list[Shard]]:
        """{entry: its shards in rank order}, once all of them are stored."""
        calls = [self._trainer.keepers[node].write.remote(staged) for node, staged in save.ranks]
        try:
            driver = write_staged(save.driver, [self._run.tiers.primary.store])
        finally:
            # Also if one has failed: as long as another still reads its buffer, nothing may be staged over it.
            ray.wait(calls, num_returns=len(calls))
        parts: dict[str, list[Shard]] = {}
        for shards in [*ray.get(calls), driver]:
            for name, shard in shards.items():
                parts.setdefault(name, []).append(shard)
        return parts

    def _tidy(self, step: int) -> None:
        """After a commit. What can't be deleted now is deleted after a later one: no reason to fail the save."""
        try:
            self._upkeep.after_commit(step)
        except StoreError as error:
            self._refused(self._run.tiers.primary.name, error)
        self._keep_in_memory(frozenset(blob.key for blob in self._run.parent_blobs))

    def _keep_in_memory(self, keys: frozenset[str]) -> None:
        """Let nodes forget all blobs but these."""
        if not self._run.tiers.memory:
            return
        for call in [keeper.keep_only.remote(keys) for keeper in self._trainer.keepers.values()]:
            try:
                ray.get(call)
            except (StoreError, *DEAD) as error:  # one that has died: the next save notices
                self._refused(self._run.tiers.memory[0].name, error)

    def _refused(self, tier: str, error: Exception) -> None:
        self._run.journal.append(RetentionFailed(tier=tier, reason=str(error)))
        _log.warning("retention on %s: %s", tier, error)
