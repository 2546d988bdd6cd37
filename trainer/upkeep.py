"""What happens to commits after they are made: carried to the other tiers, and pruned where the config says so."""

import os
import subprocess
import sys
from pathlib import Path

from checkpointing.commit import parse_commit_key
from checkpointing.disk import explained
from checkpointing.errors import StoreError
from checkpointing.events import CheckpointReplicated, CheckpointsPruned
from checkpointing.generations import delete_generations
from checkpointing.history import valid_commits
from checkpointing.journal import JournalFollower
from checkpointing.replication import undurable
from checkpointing.replicator import Job
from checkpointing.retention import Pruner, measured
from trainer.run import Run


class Replicas:
    """The process that carries this attempt's commits from the primary tier to the others, if there are others."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run: Run, drain: bool = False) -> None:
        """Raises StoreError: there is no room for its log."""
        self._end()
        if len(run.tiers.durable) == 1:
            return
        job = Job(
            run_dir=run.directory.resolve(),
            urls=tuple(run.urls),
            attempt=run.attempt.attempt,
            parent=os.getpid(),
            backlog=run.settings.backlog,
            bandwidth=run.settings.bandwidth,
            kms_key=run.settings.kms_key,
            trust=run.settings.trust(),
            keep=run.settings.keep,
            drain=drain,
        )
        log = _log(run)
        with explained(f"write {log}"), log.open("ab") as sink:
            command = [sys.executable, "-m", "checkpointing.replicator", job.model_dump_json()]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)

    def finish(self, run: Run) -> None:
        """Training is over: wait until every tier has every commit that it is to have.

        Raises:
            StoreError: a tier still lacks some after `drain_seconds`.
        """
        self.start(run, drain=True)
        if self._process is None:
            return
        try:
            code = self._process.wait(run.settings.drain_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code != 0:
            raise StoreError(
                f"training is complete and on {run.tiers.primary.name}, but not all of it on "
                f"{run.tiers.durable[-1].name} (see {_log(run)}); start the same command again"
            )

    def _end(self) -> None:
        """Not asked to end: one that is just starting would not hear it. What it was doing is done again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _log(run: Run) -> Path:
    folder = run.directory / "logs"
    with explained(f"make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"replicator-{run.attempt.attempt:06d}.log"


class Upkeep:
    """Retention on the primary tier, and how far the last tier is behind. Belongs to the thread that makes commits."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._keep = run.settings.keep.get(run.tiers.primary.name)
        self._pruner = Pruner(run.tiers.primary.store, self._keep) if self._keep else None
        self._journals = JournalFollower(run.directory)
        self._replicated: dict[str, set[str]] = {tier.name: set() for tier in run.tiers.durable[1:]}
        self._metrics: dict[int, float] = {}
        self._swept = False
        self.local_step = self.durable_step = run.resumed_step
        """Newest steps on the primary and on the last tier, as far as this run has said."""

    def after_commit(self, step: int) -> None:
        """Take note of the commit of `step`, and delete what the primary tier need not keep, and generations before it.

        Raises like `Pruner.prune`, and StoreError.
        """
        events = [record.event for record in self._journals.new()]
        for event in events:
            if isinstance(event, CheckpointReplicated) and event.tier in self._replicated:
                self._replicated[event.tier].add(event.commit)
        self.local_step, last = step, self._run.tiers.durable[-1]
        there = [parse_commit_key(key)[0] for key in self._replicated.get(last.name, ())]
        self.durable_step = max(there, default=0) if last != self._run.tiers.primary else step
        if self._pruner and self._keep:
            if self._keep.best:
                self._metrics |= measured(events, self._keep.best.metric)
            self._prune(self._pruner)
        delete_generations(self._run.directory, before=step)

    def _prune(self, pruner: Pruner) -> None:
        tier = self._run.tiers.primary
        protected = undurable(valid_commits(tier.store), self._replicated, self._run.settings.backlog)
        freed = 0 if self._swept else pruner.sweep(self._run.attempt)
        self._swept = True
        gone = pruner.prune(self._run.attempt, protected, self._metrics)
        freed += gone.bytes_freed
        if freed:
            keys = [item.key for item in gone.commits]
            self._run.journal.append(CheckpointsPruned(tier=tier.name, commits=keys, bytes_freed=freed))
