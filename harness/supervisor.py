"""Start an attempt, watch it end, clean up after it, start the next one from the newest commit."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from chaos.plan import FaultPlan
from chaos.witness import witness_fired
from checkpointing.commit import newest_attempt
from checkpointing.errors import AttemptsExhausted, ConfigError, HarnessError, WorkerLost
from checkpointing.events import AttemptEnded, FaultWitnessed, StepDone
from checkpointing.journal import Journal, read_journal
from checkpointing.store import open_store
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.processes import reap, spawn
from trainer.determinism import environment

MAX_STALLED = 5
"""Attempts in a row without a step done: whatever kills them, another one will not help."""

Watch = Callable[[], None]
"""Called about twice a second while an attempt runs."""


def _start_driver(
    config: RunConfig, engine_urls: list[str], attempt: int, faults: Path | None
) -> subprocess.Popen[bytes]:
    env = os.environ | environment(config.device) | {"HARNESS_ATTEMPT": str(attempt)}
    if faults is not None:
        env |= {"HARNESS_PHASE_LISTENER": "chaos.agent:listen", "HARNESS_FAULT_PLAN": str(faults.resolve())}
        env["HARNESS_FAULTS_PLANNED"] = str(len(FaultPlan.load(faults).faults))
    command = [sys.executable, "-m", "harness.driver", config.model_dump_json(), json.dumps(engine_urls)]
    return spawn(command, env, _log(config, attempt), _ledger(config))


def _log(config: RunConfig, attempt: int) -> Path:
    return config.run_dir / "logs" / f"attempt-{attempt:06d}.log"


def _ledger(config: RunConfig) -> Path:
    return config.run_dir / "logs" / "driver.sessions"


def _wait(driver: subprocess.Popen[bytes], engines: EnginePool, watch: Watch) -> str | None:
    """Until the driver ends, or an engine does and the driver is ended with it. Returns what was lost, None if nothing.

    Raises:
        ConfigError: an engine ended before it ever served; starting it again would not change that.
    """
    while driver.poll() is None:
        watch()
        engine = engines.lost()
        if engine is not None:
            driver.kill()
            driver.wait()
            if not engine.served:
                raise ConfigError(f"an engine ended with {engine.process.returncode} while starting, see {engine.log}")
            return f"engine ended with {engine.process.returncode}, see {engine.log}"
        time.sleep(0.5)
    watch()
    return None


def _last_words(log: Path) -> str:
    """The error line that `harness.driver` ends with, for the journal."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no output"])[-1][:500]


def _journal_end(config: RunConfig, attempt: int, code: int, lost: str | None, journal: Journal) -> str:
    """Record how the attempt ended and which planned faults were seen to have happened; returns the reason."""
    if code < 0:
        reason = lost or f"killed by {signal.Signals(-code).name}"
        ended = AttemptEnded(exit_code=None, signal=-code, reason=reason)
    else:
        reason = "complete" if code == 0 else _last_words(_log(config, attempt))
        ended = AttemptEnded(exit_code=code, signal=None, reason=reason)
    journal.append(ended)
    return reason


def _witness(config: RunConfig, faults: Path, journal: Journal) -> None:
    seen = {r.event.index for r in read_journal(config.run_dir) if isinstance(r.event, FaultWitnessed)}
    for event in witness_fired(faults.parent, seen):
        journal.append(event)


@contextmanager
def _only_supervisor(directory: Path) -> Iterator[None]:
    """Hold the run directory's lock; the kernel drops it when this process ends, however it ends.

    Raises:
        ConfigError: another `harness run` works on the directory: it would end our driver, and we its.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{directory}: another `harness run` is working on this run; stop it first") from error
        yield


def supervise(config: RunConfig, engines: EnginePool, faults: Path | None = None, watch: Watch = lambda: None) -> None:
    """Run attempts until the run is complete.

    A driver that was killed, or that ended because a rank or engine died, is followed by the next attempt. Every other
    error is the user's to see at once: trying again would not change it.

    Args:
        config: the run.
        engines: kept warm over all attempts.
        faults: a fault plan (chaos/plan.py) to inject, or None.
        watch: called while an attempt runs, to show progress.

    Raises:
        HarnessError: the attempt's own error, or `AttemptsExhausted`.
    """
    with _only_supervisor(config.run_dir):
        reap(_ledger(config))
        stalled = 0
        for _ in range(config.max_attempts):
            before = _last_step(config)
            reason = _attempt(config, engines, faults, watch)
            if reason is None:
                return
            stalled = 0 if _last_step(config) > before else stalled + 1
            if stalled == MAX_STALLED:
                raise AttemptsExhausted(f"{stalled} attempts in a row got no step further; the last: {reason}")
    raise AttemptsExhausted(f"{config.max_attempts} attempts did not complete the run; the last: {reason}")


def _last_step(config: RunConfig) -> int:
    events = [record.event for record in read_journal(config.run_dir)]
    return max((event.step for event in events if isinstance(event, StepDone)), default=0)


def _attempt(config: RunConfig, engines: EnginePool, faults: Path | None, watch: Watch) -> str | None:
    """One attempt from start to end. Returns None if the run is complete, else why another attempt is due.

    Raises:
        HarnessError: trying again would not change it.
    """
    store = open_store(f"file://{config.run_dir.resolve() / 'store'}")
    engines.start_missing()
    attempt = newest_attempt(store) + 1
    driver = _start_driver(config, engines.urls, attempt, faults)
    try:
        lost = _wait(driver, engines, watch)
    finally:
        driver.kill()
        code = driver.wait()
        reap(_ledger(config))
    if newest_attempt(store) < attempt and code >= 0:
        raise _as_error(code, _last_words(_log(config, attempt)))
    with closing(Journal(config.run_dir, "supervisor", attempt)) as journal:
        reason = _journal_end(config, attempt, code, lost, journal)
        if faults is not None:
            _witness(config, faults, journal)
    if code > 0 and code != WorkerLost.exit_code:
        raise _as_error(code, reason)
    return None if code == 0 else reason


def _as_error(code: int, reason: str) -> HarnessError:
    """The error class with this exit code, carrying the attempt's own words."""
    kinds: list[type[HarnessError]] = [kind for kind in HarnessError.__subclasses__() if kind.exit_code == code]
    return (kinds or [HarnessError])[0](reason.removeprefix("error: "))
