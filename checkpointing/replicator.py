"""The process that carries a run's commits from the primary tier to others: `python -m checkpointing.replicator JSON`.

One per attempt, one thread per tier, so that a tier that is down holds up neither training nor another tier. Nothing it
does is fatal to the run: what a tier refuses is tried again for ever, and the journal says so once per outage.

SIGTERM     carry what has been committed so far, then exit 0; whoever sent it bounds the wait
exit 16     a newer attempt exists
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    wait_exponential_jitter,
)

from checkpointing.commit import Attempt, Commit, attempt_key, read_record, require_newest
from checkpointing.errors import CorruptBlob, Fenced, HarnessError, StoreError, WorkerLost
from checkpointing.events import CheckpointReplicated, CheckpointsCoalesced, CheckpointsPruned, Event, ReplicationFailed
from checkpointing.history import ranked_commits
from checkpointing.journal import Journal, JournalFollower
from checkpointing.phases import reached
from checkpointing.redaction import redacted
from checkpointing.replication import backlog, replicate
from checkpointing.retention import Keep, Pruner, measured
from checkpointing.signing import ANYBODY, Trust
from checkpointing.store import Item, Store
from checkpointing.tiers import Tier, Tiers
from checkpointing.trace import trace_phases

POLL_SECONDS = 1.0
"""Between looks at the primary tier, and at whether the parent lives. A look is a listing of commits and attempts."""

LONGEST_WAIT = 60.0
"""Seconds between tries while a tier refuses."""


class Job(BaseModel):
    """What the process is told, as JSON.

    urls       the run's tiers, in order
    attempt    for which it works; its record exists on the primary
    parent     the process that started it: when that is gone, so is the need for this one
    backlog    commits that may wait for a tier before the oldest of them are let go
    bandwidth  bytes per second that may go to each s3 tier; None: as many as it takes
    kms_key    with which S3 encrypts what is stored there; None: as its bucket says
    trust      whose commits are carried
    keep       {tier name: its retention}; a tier that is not named keeps everything
    drain      end when what has been committed is carried, as after SIGTERM
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path
    urls: tuple[str, ...]
    attempt: int
    parent: int
    backlog: int = Field(ge=1)
    bandwidth: int | None = None
    kms_key: str | None = None
    trust: Trust = ANYBODY
    drain: bool = False
    keep: dict[str, Keep] = {}


class Voice:
    """Journals events. What storage refuses to take is kept and said before the next one."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._unsaid: deque[Event] = deque()
        self._lock = threading.Lock()

    def say(self, event: Event) -> None:
        with self._lock:
            self._unsaid.append(event)
        try:
            self.finish()
        except StoreError as error:
            print(redacted(str(error)), file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Raises StoreError: something is still unsaid."""
        with self._lock:
            while self._unsaid:
                self._journal.append(self._unsaid[0])
                self._unsaid.popleft()


class Housekeeping:
    """Retention on one tier that is written to by nobody but the calling thread."""

    def __init__(self, source: Store, tier: Tier, attempt: Attempt, keep: Keep, run_dir: Path, voice: Voice) -> None:
        self._tier, self._attempt, self._keep, self._voice = tier, attempt, keep, voice
        self._pruner = Pruner(tier.store, keep, source)
        self._journals = JournalFollower(run_dir)
        self._metrics: dict[int, float] = {}
        self._swept = False

    def __call__(self) -> None:
        """Raises like `Pruner.prune`."""
        if self._keep.best:
            events = [record.event for record in self._journals.new()]
            self._metrics |= measured(events, self._keep.best.metric)
        swept = 0 if self._swept else self._pruner.sweep(self._attempt)
        self._swept = True
        gone = self._pruner.prune(self._attempt, frozenset(), self._metrics)
        if gone.bytes_freed + swept:
            keys = [item.key for item in gone.commits]
            self._voice.say(CheckpointsPruned(tier=self._tier.name, commits=keys, bytes_freed=gone.bytes_freed + swept))


class Carrier:
    """Carries commits from `source` to one tier. `after` is called when one has arrived, and nothing is on its way."""

    def __init__(
        self, source: Store, tier: Tier, attempt: Attempt, limit: int, voice: Voice, after: Callable[[], None] | None
    ) -> None:
        self._source, self._tier, self._attempt, self._limit = source, tier, attempt, limit
        self._voice, self._after = voice, after
        self._done: Sequence[Item] | None = None
        self._outage = False
        self._let_go: set[str] = set()
        self._newest_here = 0
        self._newest_there: int | None = None

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set, and then until what was committed before is there. Raises Fenced."""
        while True:
            last = stop.is_set()
            for trying in Retrying(
                retry=retry_if_exception_type(HarnessError) & retry_if_not_exception_type(Fenced),
                wait=wait_exponential_jitter(max=LONGEST_WAIT),
                before_sleep=self._refused,
                sleep=lambda seconds: _pause(stop, seconds),
            ):
                with trying:
                    self.carry()
            if last:
                return
            stop.wait(POLL_SECONDS)

    def carry(self) -> None:
        """Carry whatever waits. A commit that the source has damaged is passed over as soon as there is a newer one.

        Raises:
            Fenced: a newer attempt exists.
            HarnessError: something refused; the next call goes on.
        """
        require_newest(self._attempt, self._source)
        listing = self._source.list("commits/")
        if listing != self._done:
            self._carry_waiting()
        self._done, self._outage = listing, False

    def _carry_waiting(self) -> None:
        self._newest_here = _newest(self._source) or 0
        self._newest_there = _newest(self._tier.store)
        damaged: dict[str, CorruptBlob] = {}
        while True:
            waiting = backlog(self._source, self._tier.store, self._limit)
            self._announce(waiting.coalesced)
            left = [found for found in waiting.pending if found.key not in damaged]
            if not left:
                break
            try:
                self._carry(left[0])
            except CorruptBlob as error:
                damaged[left[0].key] = error
                self._failed(error)
        if waiting.pending:
            raise damaged[waiting.pending[-1].key]

    def _carry(self, found: Commit) -> None:
        started = time.monotonic()
        moved = replicate(self._source, self._tier.store, self._attempt, found)
        self._newest_there = found.step
        self._voice.say(
            CheckpointReplicated(
                step=found.step,
                commit=found.key,
                tier=self._tier.name,
                bytes_new=moved,
                seconds=time.monotonic() - started,
            )
        )
        if self._after:
            self._after()

    def _announce(self, coalesced: Sequence[Commit]) -> None:
        keys = [found.key for found in coalesced if found.key not in self._let_go]
        if keys:
            self._let_go.update(keys)
            self._voice.say(CheckpointsCoalesced(tier=self._tier.name, commits=keys))

    def _refused(self, state: RetryCallState) -> None:
        error = state.outcome and state.outcome.exception()
        if error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if self._outage:
            return
        self._outage = True
        self._voice.say(
            ReplicationFailed(
                tier=self._tier.name,
                reason=str(error),
                newest_local=self._newest_here,
                newest_there=self._newest_there,
            )
        )


def _newest(store: Store) -> int | None:
    """The step of the newest valid commit."""
    return next((found.step for found in ranked_commits(store) if isinstance(found, Commit)), None)


def _pause(stop: threading.Event, seconds: float) -> None:
    """A full wait while the run goes on; when it has ended, tries follow each other quickly."""
    if stop.wait(seconds):
        time.sleep(min(seconds, POLL_SECONDS))


def work(job: Job) -> int:
    """Do `job` to its end; returns the exit code. Installs signal handlers. Raises HarnessError."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if job.drain:
        stop.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent, which decides what becomes of this process
    os.nice(10)  # training comes first
    tiers = Tiers.open(job.urls, job.bandwidth, job.kms_key, job.trust)
    source = tiers.primary.store
    attempt = read_record(Attempt, source, attempt_key(job.attempt))
    trace_phases()
    reached("worker.started", role="replicator", rank=0, pid=os.getpid())
    voice = Voice(Journal(job.run_dir, "replicator", job.attempt))
    carriers = []
    for tier in tiers.durable[1:]:
        keep = job.keep.get(tier.name)
        after = Housekeeping(source, tier, attempt, keep, job.run_dir, voice) if keep else None
        carriers.append(Carrier(source, tier, attempt, job.backlog, voice, after))
    pool = ThreadPoolExecutor(max(1, len(carriers)))
    running = {pool.submit(carrier.run, stop) for carrier in carriers}
    while running:
        done, running = wait(running, POLL_SECONDS, FIRST_EXCEPTION)
        for thread in done:
            thread.result()
        if os.getppid() != job.parent:
            return WorkerLost.exit_code
    voice.finish()
    return 0


def main() -> None:
    try:
        code = work(Job.model_validate_json(sys.argv[1]))
    except HarnessError as error:
        print(redacted(str(error)), file=sys.stderr)
        code = error.exit_code
    except Exception:
        print(redacted(traceback.format_exc()), file=sys.stderr)
        code = HarnessError.exit_code
    sys.stderr.flush()
    os._exit(code)  # not waiting for threads: one may hang in a tier that does not answer


if __name__ == "__main__":
    main()
