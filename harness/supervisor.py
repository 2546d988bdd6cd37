"""Start an attempt, watch it, clean up after it, and start the next one from the newest commit until the run is done.

Whether another attempt is due is `policy.py`, what counts as a hang is `deadlines.py`.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from chaos.witness import witness_fired
from checkpointing.commit import newest_attempt
from checkpointing.errors import CheckpointError, ConfigError, HarnessError, NonFinite, Preempted, WorkerLost
from checkpointing.events import (
    AttemptEnded,
    DiskLow,
    EngineLost,
    EngineServing,
    Event,
    FaultWitnessed,
    HangDetected,
    RunStopped,
)
from checkpointing.history import valid_commits
from checkpointing.journal import Journal, Record, read_journal
from checkpointing.progress import progress_path
from harness.config import RunConfig
from harness.deadlines import Deadlines
from harness.driver_process import ledger, log_path, start_driver, why_ended
from harness.ending import as_error, first_dead, last_lines, last_words, oom_kills, says_error
from harness.engines import FRUITLESS, EnginePool
from harness.exporter import Exporter
from harness.logs import LogStream
from harness.policy import engines_lost, engines_to_blame, failures, next_attempt
from harness.processes import reap, scratch_of
from harness.runs import CONFIG_KEY, is_recorded, leave_config, leave_tiers, only_supervisor
from harness.stopping import StopRequest

LOOK_SECONDS = 0.5

Watch = Callable[[], None]
"""Called about twice a second while an attempt runs."""


def supervise(config: RunConfig, engines: EnginePool, faults: Path | None = None, watch: Watch = lambda: None) -> None:
    """Run attempts until the run is complete.

    A driver that was killed or hung, or that ended because a rank or engine died, is followed by the next attempt as
    long as `policy.next_attempt` says so. Every other error is the user's to see at once: trying again would not change
    it. SIGTERM, Ctrl-C and `harness stop` end the attempt within `supervision.grace_seconds`.

    Args:
        config: the run.
        engines: kept warm over all attempts.
        faults: a fault plan (chaos/plan.py) to inject, or None.
        watch: called while an attempt runs, to show progress.

    Raises:
        Preempted: asked to stop before the run was complete.
        HarnessError: the attempt's own error, or why `policy.next_attempt` gave up.
    """
    with (
        only_supervisor(config.run_dir),
        StopRequest(config.run_dir, config.supervision.grace_seconds) as stop,
        Exporter(config, stop) as exporter,
    ):
        leave_tiers(config.run_dir, config.checkpoints)

        def look() -> None:
            exporter.look()
            watch()

        supervisor = _Supervisor(config, engines, faults, look, stop)
        if supervisor.is_first and not (config.run_dir / CONFIG_KEY).exists():
            leave_config(config.run_dir, config)
        reap(ledger(config))
        supervisor.run()


class _Lost(NamedTuple):
    """Why an attempt is ended from outside, and the log of what went wrong first. `error`: why there is no other.
    `engine`: the one that was lost, if one was."""

    reason: str
    log: Path
    error: HarnessError | None = None
    engine: int | None = None


class _Supervisor:
    def __init__(
        self, config: RunConfig, engines: EnginePool, faults: Path | None, watch: Watch, stop: StopRequest
    ) -> None:
        self._config, self._engines, self._faults, self._watch, self._stop = config, engines, faults, watch, stop
        self._tiers = config.checkpoints.open(config.run_dir)
        self._deadlines = Deadlines(config.supervision)
        self._logs = LogStream(config.run_dir / "logs", engines.log_paths, ledger(config))
        self._said_disk_low = False
        self._seen: set[int] | None = None
        """Planned faults that the journal says were witnessed, once it was read."""
        self._found = self._newest()
        self._ours = False
        """Something was said in the journal, or is to be. See `_is_ours`."""
        self._untold: list[Record] = []
        """Attempts that were killed before they could see whose the directory is: its journal can't be told."""

    @property
    def is_first(self) -> bool:
        """Whether no attempt has ever claimed the directory."""
        return self._found == 0

    def run(self) -> None:
        try:
            while not self._one_more():
                pass
        except HarnessError as error:
            if self._ours:
                # After all that was said, also of attempts that died before they had a number.
                last = max((record.attempt for record in read_journal(self._config.run_dir)), default=0)
                self._say(last, RunStopped(exit_code=error.exit_code, reason=str(error)))
            raise

    def _one_more(self) -> bool:
        """One attempt, if one is due. True if the run is complete. Raises like `supervise`."""
        failed = failures(read_journal(self._config.run_dir) + self._untold)
        try:
            again = next_attempt(failed, self._config.supervision, time.time())
        except HarnessError:
            # Else a supervisor that was killed before it could say so would keep the run from starting.
            self._ours |= not self._untold
            raise
        self._stop.sleep(again.wait)
        if self._stop.asked:
            raise Preempted("stopped as asked, between two attempts; start it again to go on")
        newest = next(iter(valid_commits(self._tiers)), None) if again.instead else None
        unusable = {newest.key: str(again.instead)} if newest else {}
        try:
            code, reason = self._attempt(unusable)
        except CheckpointError as error:
            if again.instead and unusable:
                self._ours = True  # as above: this run's journal has led here
                raise type(again.instead)(f"{again.instead}; and there is no older checkpoint: {error}") from error
            raise
        if code != 0 and self._stop.asked:
            raise Preempted(f"stopped as asked ({reason.removeprefix('error: ')}); start it again to go on")
        return code == 0

    def _attempt(self, unusable: dict[str, str]) -> tuple[int, str]:
        """One attempt from start to end: (its exit code, or minus the signal that ended it; why it ended).

        Raises:
            HarnessError: trying again would not change it.
        """
        config, before = self._config, self._newest()
        self._engines.start_missing()
        attempt, kills = before + 1, oom_kills()
        progress_path(config.run_dir, attempt).unlink(missing_ok=True)
        self._deadlines.begin(progress_path(config.run_dir, attempt), time.monotonic())
        self._logs.begin(attempt)
        log = log_path(config, attempt)
        old = log.stat().st_size if log.exists() else 0  # of one that died before it had this number
        driver = start_driver(config, self._engines.urls, attempt, self._faults, unusable)
        try:
            lost = self._wait(driver, attempt)
            lines = last_lines(lost.log if lost else first_dead(last_words(log), log, scratch_of(ledger(config))))
        finally:
            driver.kill()
            code = driver.wait()
            reap(ledger(config), self._logs.end)
        newest = self._newest()
        silent = code == HarnessError.exit_code and not says_error(log, old)
        error = lost.error if lost else None
        # Before it had a number only a machine that was too busy for its cluster gives another one a chance.
        if newest == before and code >= 0 and not silent and code != WorkerLost.exit_code:
            raise error or as_error(code, last_words(log))
        if newest > before:
            leave_config(config.run_dir, config)
        kills = max(oom_kills() - kills, 0)
        reason = lost.reason if lost and code < 0 else why_ended(code, last_words(log), silent)
        if kills and code != 0:
            reason = f"the kernel killed {kills} processes for want of memory: {reason}"
        # A driver whose ranks had to fall back to an older commit has become a further attempt.
        engine = lost.engine if lost and code < 0 else None
        self._journal_end(max(newest, attempt), code, reason, lines, kills, engine)
        if code != 0:
            self._engines.end_silent()
        if code != 0 and engines_to_blame(read_journal(config.run_dir), attempt):
            self._engines.end_all()
        if error:
            raise error
        if code > 0 and not silent and code not in (WorkerLost.exit_code, NonFinite.exit_code, Preempted.exit_code):
            raise as_error(code, reason)
        return code, reason

    def _journal_end(
        self, attempt: int, code: int, reason: str, lines: list[str], kills: int, engine: int | None
    ) -> None:
        """Record how the attempt ended and which planned faults were seen to have happened."""
        place = self._deadlines.place
        ended = AttemptEnded(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            reason=reason,
            step=place.step if place else None,
            phase=place.phase if place else None,
            last_lines=lines if code != 0 else [],
            oom_kills=kills,
            engine=engine,
        )
        told = self._is_ours()
        self._untold = [] if told else [*self._untold, Record(0, time.time(), attempt, "supervisor", ended)]
        self._say(attempt, ended, *self._witnessed())

    def _wait(self, driver: subprocess.Popen[bytes], attempt: int) -> _Lost | None:
        """Until the driver ends, or is ended because of something else, which is returned."""
        log, told = log_path(self._config, attempt), False
        while driver.poll() is None:
            self._watch()
            self._logs.look()
            self._look_at_disk(attempt)
            if witnessed := self._witnessed():  # at once: a driver that rebuilds ranks soon is another attempt
                self._say(max(self._newest(), attempt), *witnessed)
            if self._stop.over:
                return _Lost("not done when its time of grace was over", log)
            if self._stop.asked and not told:
                driver.send_signal(signal.SIGTERM)
                told = True
            # Engines may have been told to stop as well, and what is told waits for what it has begun.
            lost = None if told else self._engine_lost() or self._hang(attempt, log)
            if lost:
                return lost
            time.sleep(LOOK_SECONDS)
        self._watch()
        self._deadlines.check(time.monotonic())
        return None

    def _engine_lost(self) -> _Lost | None:
        """Start an engine that was lost anew, while the attempt goes on, if that can help; else what ends it."""
        found = self._engines.wrong()
        for back, seconds in self._engines.returned():
            self._say(self._newest(), EngineServing(url=back.url, seconds=seconds))
        if found is None:
            return None
        (engine, wrong), code = found, found[0].process.returncode
        reason = f"engine {engine.index} {wrong}, see {engine.log}"
        if not (engine.served or engine.proven) and (code or 0) > 0:
            reason = f"while starting, {reason}"
            return _Lost(reason, engine.log, ConfigError(reason), engine.index)
        lost = engines_lost(read_journal(self._config.run_dir), time.time())
        hopeless = engine.fruitless >= FRUITLESS or lost >= self._config.supervision.restarts_per_hour
        if hopeless or not self._engines.can_restart_alone:
            return _Lost(reason, engine.log, engine=engine.index)
        url, lines = self._engines.urls[engine.index], last_lines(engine.log)
        said = EngineLost(engine=engine.index, url=url, exit_code=code, reason=reason, last_lines=lines)
        self._say(self._newest(), said)
        engine.lost = engine.lost or time.monotonic()
        self._engines.restart(engine)
        return None

    def _hang(self, attempt: int, log: Path) -> _Lost | None:
        overdue = self._deadlines.check(time.monotonic(), self._engines.starting)
        if overdue is None:
            return None
        self._say(max(self._newest(), attempt), HangDetected(**overdue._asdict(), last_lines=last_lines(log)))
        return _Lost(f"hang: {overdue}", log)

    def _look_at_disk(self, attempt: int) -> None:
        limit, free = self._config.supervision.disk_low_bytes, shutil.disk_usage(self._config.run_dir).free
        # Not before the attempt has claimed the directory: it may turn out to be another run's.
        if free < limit and not self._said_disk_low and (newest := self._newest()) >= attempt:
            self._said_disk_low = True
            self._say(newest, DiskLow(free_bytes=free, limit_bytes=limit))

    def _witnessed(self) -> list[FaultWitnessed]:
        """Planned faults that have been seen to have happened since this was last asked."""
        if self._faults is None:
            return []
        if self._seen is None:
            events = [record.event for record in read_journal(self._config.run_dir)]
            self._seen = {event.index for event in events if isinstance(event, FaultWitnessed)}
        witnessed = witness_fired(self._faults.parent, self._seen)
        self._seen |= {event.index for event in witnessed}
        return witnessed

    def _newest(self) -> int:
        return newest_attempt(self._tiers.primary.store)

    def _is_ours(self) -> bool:
        """Whether the directory is known to be this run's: its drivers know, and say so by claiming it. Before they
        do, it is if nobody has claimed it yet, or the run that did was last started with this config."""
        self._ours = self._ours or self.is_first or is_recorded(self._config) or self._newest() > self._found
        return self._ours

    def _say(self, attempt: int, *events: Event) -> None:
        """Unless the journal may be another run's, which is not to be touched."""
        if not self._is_ours():
            return
        with closing(Journal(self._config.run_dir, "supervisor", attempt)) as journal:
            for event in events:
                journal.append(event)
