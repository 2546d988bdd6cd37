"""What the supervisor does about each way a driver can end, hang or be asked to stop.

The drivers here claim an attempt and then do what the test says: `DRIVER` runs one word after the other.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.commit import Commit, commit, start_attempt
from checkpointing.errors import (
    AttemptsExhausted,
    ConfigError,
    DivergenceError,
    Fenced,
    HarnessError,
    NonFinite,
    NoProgress,
    Poisoned,
    Preempted,
    RunMismatch,
    WorkerLost,
)
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    DiskLow,
    EngineLost,
    EngineServing,
    Event,
    HangDetected,
    RunStopped,
)
from checkpointing.history import newest_restorable
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import Manifest
from checkpointing.progress import progress_path
from checkpointing.store import open_store
from checkpointing.trace import trace_folder
from harness import driver_process, supervisor
from harness.config import Engines, RunConfig, Supervision
from harness.deadlines import Deadlines
from harness.engines import ANSWER_SECONDS, FRUITLESS, Engine, EnginePool
from harness.logs import LogStream, stream_path
from harness.policy import NO_PROGRESS
from harness.processes import reap, spawn
from harness.runs import recorded_run
from harness.stopping import STOP_FILE, StopRequest

DRIVER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from checkpointing.commit import commit, newest_attempt, start_attempt
from checkpointing.events import AttemptStarted, GenerationRejected
from checkpointing.history import newest_restorable
from checkpointing.journal import Journal
from checkpointing.manifest import Manifest
from checkpointing.progress import ProgressFile
from checkpointing.store import open_store
run, drivers = Path(sys.argv[1]), json.loads(sys.argv[2])
store = open_store(f"file://{run / 'store'}")
unusable = json.loads(os.environ["HARNESS_UNUSABLE"])
verb, _, code = drivers[newest_attempt(store)].partition("=")
if verb in ("refuse", "unclaimed"):  # before it has a number; `drivers` names it once for all the times
    print("error: another run's" if verb == "refuse" else "starting", flush=True)
    os.kill(os.getpid(), -int(code)) if int(code) < 0 else os._exit(int(code))
try:
    found, _ = newest_restorable(store, unusable=unusable)
except Exception as error:
    print(f"error: {error}", flush=True)
    os._exit(12)
attempt = start_attempt(store, found[0] if found else None)
step, parent = (found[1].step, found[0]) if found else (0, None)
journal = Journal(run, "driver", attempt.attempt)
journal.append(AttemptStarted(pid=os.getpid(), resumed_from=step or None, world_size=1))
progress = ProgressFile(Path(os.environ["HARNESS_PROGRESS"]))
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
words = drivers[attempt.attempt - 1].split()
print("error: said by the driver" if "mute" not in words else "gone", flush=True)
for word in words:
    verb, _, what = word.partition("=")
    match verb:
        case "reject":
            rejected = GenerationRejected(step=1, session="a_0", reason="no tokens", given_up=what == "give_up")
            journal.append(rejected)
        case "at":
            progress.hear(what, {"step": step + 1})
        case "save":
            step = int(what)
            manifest = Manifest(step=step, topology={}, entries={}, run={})
            parent = commit(store, attempt, manifest, parent)
        case "sleep":
            time.sleep(float(what))
        case "again":
            attempt = start_attempt(store, parent, after=attempt.attempt)
        case "stop":
            (run / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        case "say":
            (run / what).touch()
        case "until":
            while not asked.wait(0.02) and not (run / what).exists():
                pass
        case "linger":
            time.sleep(600)
        case "end":
            code = int(what)
            os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
"""

LIMITS = Supervision(backoff_seconds=0.0, poison_after=100, disk_low_bytes=0)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(run_dir=tmp_path / "run", device="cpu", supervision=LIMITS, skyrl={})


def limited(config: RunConfig, **limits: object) -> RunConfig:
    return config.model_copy(update={"supervision": config.supervision.model_copy(update=limits)})


Supervise = Callable[..., None]


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """supervise(config, drivers): attempt N does what the Nth of `drivers` says."""

    def run(config: RunConfig, *drivers: str, watch: Callable[[], None] = lambda: None) -> None:
        def start(
            config: RunConfig, urls: list[str], attempt: int, faults: Path | None, unusable: dict[str, str]
        ) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", DRIVER, str(config.run_dir.resolve()), json.dumps(drivers)]
            progress = progress_path(config.run_dir, attempt)
            env = os.environ | {"HARNESS_UNUSABLE": json.dumps(unusable), "HARNESS_PROGRESS": str(progress)}
            return spawn(command, env, driver_process.log_path(config, attempt), driver_process.ledger(config))

        monkeypatch.setattr(supervisor, "start_driver", start)
        monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.02)
        supervisor.supervise(config, EnginePool(config, config.run_dir / "logs"), None, watch)

    return run


def journaled[E: Event](config: RunConfig, kind: type[E]) -> list[E]:
    return [record.event for record in read_journal(config.run_dir) if isinstance(record.event, kind)]


def endings(config: RunConfig) -> list[int | None]:
    return [e.exit_code if e.signal is None else -e.signal for e in journaled(config, AttemptEnded)]


def resumed(config: RunConfig) -> list[int | None]:
    return [event.resumed_from for event in journaled(config, AttemptStarted)]


def test_a_killed_driver_and_a_lost_rank_are_followed_by_the_next_attempt(
    config: RunConfig, supervise: Supervise
) -> None:
    supervise(config, "at=generate.begin end=-9", "end=17", "end=0")
    assert endings(config) == [-9, 17, 0]
    first, second, last = journaled(config, AttemptEnded)
    assert (first.step, first.phase, first.reason) == (1, "generate", "killed by SIGKILL")
    assert (second.phase, second.reason) == ("start", "error: said by the driver")
    assert first.last_lines == ["error: said by the driver"] and last.last_lines == []
    assert journaled(config, RunStopped) == []


@pytest.mark.parametrize(("code", "kind"), [(10, ConfigError), (14, DivergenceError), (1, HarnessError)])
def test_an_error_of_the_users_is_not_tried_again(
    config: RunConfig, supervise: Supervise, code: int, kind: type[HarnessError]
) -> None:
    with pytest.raises(kind, match="said by the driver") as caught:
        supervise(config, f"end={code}", "end=0")
    assert caught.value.exit_code == code
    assert endings(config) == [code]
    assert journaled(config, RunStopped) == [RunStopped(exit_code=code, reason="said by the driver")]


def test_a_driver_that_ends_with_1_and_does_not_say_why_was_ended_by_ray(
    config: RunConfig, supervise: Supervise
) -> None:
    supervise(config, "save=1 mute end=1", "end=0")
    assert (endings(config), resumed(config)) == ([1, 0], [None, 1])
    first, _ = journaled(config, AttemptEnded)
    assert first.reason == "ended with 1 and said nothing: Ray ends a driver that has lost its head"
    assert first.last_lines == ["gone"]


def test_what_a_driver_said_before_one_of_the_same_number_is_not_that_one_s(
    config: RunConfig, supervise: Supervise
) -> None:
    log = driver_process.log_path(config, 1)
    log.parent.mkdir(parents=True)
    log.write_text("error: of one that died before it had a number\n")
    supervise(config, "mute end=1", "end=0")
    assert endings(config) == [1, 0]


def test_an_attempt_that_dies_before_it_has_a_number_counts(config: RunConfig, supervise: Supervise) -> None:
    for code in (-9, 1):
        with pytest.raises(NoProgress, match="5 attempts in a row"):
            supervise(config, f"unclaimed={code}")
    assert endings(config) == [-9] * NO_PROGRESS + [1] * NO_PROGRESS


def test_an_attempt_whose_cluster_did_not_start_is_followed_by_another_one(
    config: RunConfig, supervise: Supervise
) -> None:
    with pytest.raises(NoProgress, match="5 attempts in a row"):
        supervise(config, f"refuse={WorkerLost.exit_code}")
    assert endings(config) == [WorkerLost.exit_code] * NO_PROGRESS


def test_the_journal_of_what_may_be_another_run_is_not_touched(config: RunConfig, supervise: Supervise) -> None:
    supervise(config, "save=1 end=0")
    before, changed = read_journal(config.run_dir), config.model_copy(update={"skyrl": {"trainer": {"epochs": 2}}})
    with pytest.raises(NoProgress, match="5 attempts in a row"):
        supervise(changed, "", "unclaimed=-9")
    assert read_journal(config.run_dir) == before, "and yet they counted"
    with pytest.raises(NoProgress):
        supervise(limited(config, grace_seconds=1.0), "", "unclaimed=-9")
    assert endings(config) == [0] + [-9] * NO_PROGRESS, "the run was last started with this config"


def test_a_directory_that_was_claimed_without_a_config_is_not_given_ours(
    config: RunConfig, supervise: Supervise
) -> None:
    start_attempt(open_store(f"file://{config.run_dir / 'store'}"), None)
    with pytest.raises(RunMismatch):
        supervise(config, "", "refuse=11")
    assert not (config.run_dir / "config.json").exists() and read_journal(config.run_dir) == []


def test_attempts_are_limited_and_whoever_starts_the_run_again_has_a_new_budget(
    config: RunConfig, supervise: Supervise
) -> None:
    drivers = ["end=17"] * 3 + ["end=17", "end=0"]
    with pytest.raises(AttemptsExhausted, match="3 attempts failed within an hour; the last: error: said"):
        supervise(limited(config, restarts_per_hour=2), *drivers)
    assert endings(config) == [17, 17, 17]
    supervise(limited(config, restarts_per_hour=2), *drivers)
    assert endings(config) == [17, 17, 17, 17, 0]


def test_attempts_that_get_nowhere_end_the_run(config: RunConfig, supervise: Supervise) -> None:
    with pytest.raises(NoProgress, match="5 attempts in a row got no step further"):
        supervise(config, *["end=17"] * 10)
    assert endings(config) == [17] * NO_PROGRESS


def test_what_a_supervisor_that_was_killed_had_seen_counts_once(config: RunConfig, supervise: Supervise) -> None:
    journal = Journal(config.run_dir, "supervisor", 1)
    for _ in range(NO_PROGRESS):
        journal.append(AttemptEnded(exit_code=17, signal=None, reason="a rank died"))
    journal.close()
    with pytest.raises(NoProgress):
        supervise(config, "end=0")
    assert endings(config) == [17] * NO_PROGRESS, "no further attempt was made"
    supervise(config, "end=0")


def test_one_supervisor_a_run(config: RunConfig, supervise: Supervise) -> None:
    config.run_dir.mkdir()
    with (config.run_dir / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `harness run`"):
            supervise(config, "end=0")
    supervise(config, "end=0")


FAILS_AT_3 = "at=train.begin end=17"


def test_a_poison_step_is_tried_from_an_older_checkpoint_and_then_no_more(
    config: RunConfig, supervise: Supervise
) -> None:
    poisoned = limited(config, poison_after=2)
    drivers = [f"save=1 save=2 {FAILS_AT_3}", FAILS_AT_3, f"save=2 {FAILS_AT_3}", "end=0"]
    with pytest.raises(Poisoned, match="step 3 failed 3 times in train: error: said by the driver") as caught:
        supervise(poisoned, *drivers)
    assert caught.value.exit_code == 24
    assert resumed(config) == [None, 2, 1]
    assert [event.exit_code for event in journaled(config, RunStopped)] == [24]


def test_a_poison_step_that_an_older_checkpoint_gets_over(config: RunConfig, supervise: Supervise) -> None:
    supervise(limited(config, poison_after=2), f"save=1 save=2 {FAILS_AT_3}", FAILS_AT_3, "save=2 save=3 end=0")
    assert resumed(config) == [None, 2, 1]


def test_a_poison_step_without_an_older_checkpoint(config: RunConfig, supervise: Supervise) -> None:
    with pytest.raises(Poisoned, match=r"step 3 failed 2 times .* there is no older checkpoint: "):
        supervise(limited(config, poison_after=2), f"save=2 {FAILS_AT_3}", FAILS_AT_3, "end=0")


def test_a_supervisor_that_finds_no_older_checkpoint_does_not_lock_the_run(
    config: RunConfig, supervise: Supervise
) -> None:
    """The one that saw the failures was killed before it could say that it stops, and so may the next one be."""
    config, drivers = limited(config, poison_after=1), [f"save=2 {FAILS_AT_3}", "save=3 end=0"]
    with pytest.raises(Poisoned):
        supervise(config, *drivers)
    said = config.run_dir / "journal" / "supervisor-000001.jsonl"
    said.write_text("".join(line for line in said.read_text().splitlines(True) if "run.stopped" not in line))
    with pytest.raises(Poisoned, match="there is no older checkpoint"):
        supervise(config, *drivers)
    assert [event.exit_code for event in journaled(config, RunStopped)] == [24]
    supervise(config, *drivers)
    assert resumed(config) == [None, 2]


def test_non_finite_numbers_go_back_once(config: RunConfig, supervise: Supervise) -> None:
    drivers = ["save=1 save=2 at=step.trained end=25", "save=2 at=step.trained end=25", "end=0"]
    with pytest.raises(NonFinite, match="said by the driver"):
        supervise(config, *drivers)
    assert resumed(config) == [None, 1]


def test_non_finite_numbers_stop_the_run_where_the_config_says_so(config: RunConfig, supervise: Supervise) -> None:
    with pytest.raises(NonFinite):
        supervise(limited(config, on_non_finite="stop"), "save=1 save=2 end=25", "end=0")
    assert resumed(config) == [None]


def test_a_driver_that_hangs_is_ended_and_followed(
    config: RunConfig, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadlines, "limit", lambda self, phase: 0.5 if phase == "generate" else 600.0)
    supervise(config, "at=generate.begin stop linger", "end=0")
    assert endings(config) == [-9, 0]
    (hang,) = journaled(config, HangDetected)
    assert (hang.phase, hang.step, hang.limit) == ("generate", 1, 0.5) and hang.seconds > 0.5
    assert hang.last_lines == ["error: said by the driver"]
    assert journaled(config, AttemptEnded)[0].reason.startswith("hang: no sign of generate at step 1 for ")
    with pytest.raises(ProcessLookupError):
        os.kill(int((config.run_dir / "stopped").read_text()), signal.SIGCONT)


def test_what_is_seen_after_ranks_were_rebuilt_is_of_the_attempt_that_the_driver_has_become(
    config: RunConfig, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadlines, "limit", lambda self, phase: 0.3 if phase == "generate" else 600.0)

    def usage(_folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=0 if (config.run_dir / "again").exists() else 2)

    monkeypatch.setattr("harness.supervisor.shutil", SimpleNamespace(disk_usage=usage))
    supervise(limited(config, disk_low_bytes=1), "again say=again at=generate.begin linger", "", "end=0")
    said = {type(record.event): record.attempt for record in reversed(read_journal(config.run_dir))}
    assert (said[HangDetected], said[AttemptEnded]) == (2, 2)
    assert said[DiskLow] == 2


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """Engines as they are started: real processes that do nothing, and are healthy."""
    started: list[Engine] = []

    def start(pool: EnginePool, index: int, url: str) -> Engine:
        log, ledger = pool.logs / f"engine-{index}.log", pool.logs / f"engine-{index}-{len(started)}.sessions"
        process = spawn([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, log, ledger)
        started.append(Engine(index, process, url, log, ledger))
        return started[-1]

    monkeypatch.setattr(EnginePool, "_start", start)
    monkeypatch.setattr("harness.engines.is_healthy", lambda url, seconds=5.0: True)
    monkeypatch.setattr("harness.engines.can_generate", lambda url, model: True)
    monkeypatch.setattr("harness.engines.HEALTH_SECONDS", 0.0)
    yield started
    for engine in started:
        engine.end()


def with_engines(config: RunConfig, count: int = 1, lora: int = 8, **limits: object) -> RunConfig:
    skyrl = {"trainer": {"policy": {"model": {"path": "model", "lora": {"rank": lora}}}}}
    return limited(config, **limits).model_copy(update={"engines": Engines(count=count), "skyrl": skyrl})


def training(config: RunConfig) -> bool:
    return (config.run_dir / "training").exists()


def ended(config: RunConfig, code: int) -> subprocess.Popen[bytes]:
    """A process that has ended with `code`."""
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    process = spawn(command, os.environ, config.run_dir / "ended.log", config.run_dir / "ended.sessions")
    process.wait()
    reap(config.run_dir / "ended.sessions")
    return process


def when_served(config: RunConfig, engines: list[Engine], act: Callable[[int], None]) -> Callable[[], None]:
    """A watch that calls act(n) once, when a driver trains and the nth engine that was started has served."""
    done: set[int] = set()

    def watch() -> None:
        for number, engine in enumerate(engines):
            if training(config) and engine.served and number not in done:
                done.add(number)
                act(number)

    return watch


def test_an_engine_that_is_lost_is_started_alone(
    config: RunConfig, supervise: Supervise, engines: list[Engine]
) -> None:
    """The driver of the one attempt goes on, and ends when told that the second engine serves."""

    def act(number: int) -> None:
        if number == 0:
            engines[0].process.kill()
        else:
            (config.run_dir / "enough").touch()

    supervise(with_engines(config), "say=training until=enough end=0", watch=when_served(config, engines, act))
    assert endings(config) == [0] and len(engines) == 2
    assert engines[0].url == engines[1].url, "whoever asks it need not be told"
    (lost,) = journaled(config, EngineLost)
    assert lost.engine == 0 and lost.reason.startswith("engine 0 ended with -9, see ")
    assert (lost.url, lost.exit_code) == (engines[0].url, -9)
    (back,) = journaled(config, EngineServing)
    assert back.url == lost.url, "said once, and not of the first start"
    assert journaled(config, AttemptEnded)[0].engine is None


def test_an_engine_that_falls_silent_is_started_alone(
    config: RunConfig, supervise: Supervise, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent: list[bool] = []

    def act(number: int) -> None:
        silent[:] = [True]
        if number == 1:
            (config.run_dir / "enough").touch()

    def healthy(url: str, seconds: float = 5.0) -> bool:
        return not silent or len(engines) > 1

    monkeypatch.setattr("harness.engines.is_healthy", healthy)
    supervise(
        with_engines(config, engine_seconds=0.1),
        "say=training until=enough end=0",
        watch=when_served(config, engines, act),
    )
    assert engines[0].process.poll() is not None
    lost = journaled(config, EngineLost)[0]
    assert lost.reason.startswith("engine 0 answered nothing for 0 s") and lost.exit_code is None


def test_full_weights_need_all_engines_so_the_loss_of_one_ends_the_attempt(
    config: RunConfig, supervise: Supervise, engines: list[Engine]
) -> None:
    def act(number: int) -> None:
        if number == 0:
            engines[0].process.kill()

    supervise(
        with_engines(config, lora=0), "say=training until=never", "end=0", watch=when_served(config, engines, act)
    )
    assert (endings(config), len(engines)) == ([-9, 0], 2)
    assert journaled(config, EngineLost) == []
    first, last = journaled(config, AttemptEnded)
    assert "engine 0 ended with -9" in first.reason and (first.engine, last.engine) == (0, None)


def test_an_engine_that_never_serves_again_ends_the_attempt(
    config: RunConfig, supervise: Supervise, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.is_healthy", lambda url, seconds=5.0: len(engines) == 1)

    def watch() -> None:
        if training(config) and engines[0].served and len(engines) <= FRUITLESS + 1:
            if len(engines) == 1:
                engines[0].process.kill()
            elif engines[-1].process.poll() is None:
                engines[-1].end()  # it can't even start: no error of the config's, which has worked before
                engines[-1].process = ended(config, 3)

    supervise(with_engines(config), "say=training until=never", "end=0", watch=watch)
    assert [event.reason.partition(",")[0] for event in journaled(config, EngineLost)] == [
        "engine 0 ended with -9", "engine 0 ended with 3", "engine 0 ended with 3"
    ]  # fmt: skip
    assert endings(config) == [-9, 0]


def test_engines_have_the_hours_budget_too(config: RunConfig, supervise: Supervise, engines: list[Engine]) -> None:
    def watch() -> None:
        if training(config) and engines[-1].served and len(endings(config)) == 0:
            engines[-1].process.kill()

    supervise(with_engines(config, restarts_per_hour=2), "say=training until=never", "end=0", watch=watch)
    assert len(journaled(config, EngineLost)) == 2
    assert endings(config) == [-9, 0]


def test_a_supervisor_that_is_started_again_knows_the_engines_that_were_lost(
    config: RunConfig, supervise: Supervise, engines: list[Engine]
) -> None:
    journal = Journal(config.run_dir, "supervisor", 1)
    for _ in range(2):
        journal.append(EngineLost(engine=0, reason="ended", last_lines=[]))
    journal.close()

    def act(number: int) -> None:
        if number == 0:
            engines[0].process.kill()

    drivers = "say=training until=never", "end=0"
    supervise(with_engines(config, restarts_per_hour=2), *drivers, watch=when_served(config, engines, act))
    assert len(journaled(config, EngineLost)) == 2
    assert endings(config) == [-9, 0]


def test_a_hung_engine_takes_little_of_the_supervisor_s_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def healthy(url: str, seconds: float = 5.0) -> bool:
        allowed.append(seconds)
        return False

    monkeypatch.setattr("harness.engines.is_healthy", healthy)
    running: Any = SimpleNamespace(poll=lambda: None)
    Engine(0, running, "http://nowhere", tmp_path / "log", tmp_path / "ledger").what_is_wrong(time.monotonic(), 60.0)
    assert allowed == [ANSWER_SECONDS] and ANSWER_SECONDS <= 1.0


def test_an_engine_that_ends_by_itself_before_it_serves_is_a_config_error(
    config: RunConfig, supervise: Supervise, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.is_healthy", lambda url, seconds=5.0: False)

    def watch() -> None:
        engines[0].end()
        engines[0].process = ended(config, 3)

    with pytest.raises(ConfigError, match="while starting, engine 0 ended with 3"):
        supervise(with_engines(config), "say=training until=never", watch=watch)
    (attempt,) = journaled(config, AttemptEnded)
    assert attempt.reason.startswith("while starting, engine 0 ended with 3")
    (stopped,) = journaled(config, RunStopped)
    assert (stopped.exit_code, stopped.reason) == (10, attempt.reason)


def test_an_engine_that_starts_keeps_its_attempt_from_being_a_hang(
    config: RunConfig, supervise: Supervise, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deadlines, "limit", lambda self, phase: 0.3)
    monkeypatch.setattr("harness.engines.is_healthy", lambda url, seconds=5.0: (config.run_dir / "healthy").exists())

    def watch() -> None:
        if training(config) and engines and time.monotonic() - engines[0].heard > 1.5:
            (config.run_dir / "healthy").touch()

    supervise(with_engines(config), "say=training at=generate.begin until=healthy at=reward.begin end=0", watch=watch)
    assert endings(config) == [0] and journaled(config, HangDetected) == []


def test_an_engine_that_never_comes_to_serve_is_lost(
    config: RunConfig, supervise: Supervise, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.engines.is_healthy", lambda url, seconds=5.0: bool(endings(config)))
    monkeypatch.setattr("harness.engines.START_SECONDS", 0.5)
    supervise(with_engines(config), "until=never", "end=0")
    assert len(journaled(config, EngineLost)) == FRUITLESS - 1
    assert journaled(config, AttemptEnded)[0].reason.startswith("engine 0 answered nothing for ")


def test_an_engine_that_does_not_generate_is_replaced_for_the_next_attempt(
    config: RunConfig, supervise: Supervise, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core hangs: healthy by its own word."""
    monkeypatch.setattr("harness.engines.can_generate", lambda url, model: url != engines[0].url or len(engines) > 2)

    def watch() -> None:
        if all(engine.served for engine in engines):
            (config.run_dir / "enough").touch()

    supervise(with_engines(config, count=2), "say=training until=enough end=17", "end=17", "end=0", watch=watch)
    assert [engine.process.poll() is None for engine in engines] == [False, True, True]


def test_engines_whose_answers_stay_malformed_are_replaced(
    config: RunConfig, supervise: Supervise, engines: list[Engine]
) -> None:
    drivers = ("end=17", "reject=keep end=17", "reject=give_up end=17", "end=17", "end=0")
    supervise(with_engines(config, count=2), *drivers)
    assert [engine.process.poll() is None for engine in engines] == [False] * 2 + [True] * 2
    assert [engine.index for engine in engines] == [0, 1, 0, 1]


def test_a_driver_that_wakes_up_late_can_commit_nothing(config: RunConfig, supervise: Supervise) -> None:
    """As on a machine that this supervisor can't reach: the old attempt is still there when the next one starts."""
    store = open_store(f"file://{config.run_dir / 'store'}")
    old = start_attempt(store, None)
    first: Commit = commit(store, old, Manifest(step=1, topology={}, entries={}, run={}), None)
    supervise(config, "", "save=2 end=0")
    with pytest.raises(Fenced):
        commit(store, old, Manifest(step=2, topology={}, entries={}, run={}), first)
    found, _ = newest_restorable(store)
    assert found is not None and (found[1].step, found[0].attempt) == (2, 2)


def test_asked_to_stop_the_driver_is_told_and_its_code_passed_on(config: RunConfig, supervise: Supervise) -> None:
    def watch() -> None:
        if (config.run_dir / "training").exists():
            os.kill(os.getpid(), signal.SIGTERM)
            (config.run_dir / "training").unlink()

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="stopped as asked") as caught:
        supervise(config, "say=training until=never save=1 end=75", "end=0", watch=watch)
    assert caught.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    assert endings(config) == [75]
    supervise(config, "", "end=0")
    assert resumed(config) == [None, 1]


def test_a_driver_that_does_not_stop_is_ended_when_its_grace_is_over(config: RunConfig, supervise: Supervise) -> None:
    def watch() -> None:
        if (config.run_dir / "training").exists():
            (config.run_dir / STOP_FILE).touch()

    with pytest.raises(Preempted, match="not done when its time of grace was over"):
        supervise(limited(config, grace_seconds=0.3), "say=training linger", watch=watch)
    assert endings(config) == [-9]
    assert not (config.run_dir / STOP_FILE).exists()


def test_told_alone_the_driver_saves_and_is_followed(config: RunConfig, supervise: Supervise) -> None:
    supervise(config, "save=1 end=75", "end=0")
    assert (endings(config), resumed(config)) == ([75, 0], [None, 1])


def test_asked_to_stop_between_two_attempts(
    config: RunConfig, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = StopRequest.sleep

    def asked(stop: StopRequest, seconds: float) -> None:
        if seconds:
            (config.run_dir / STOP_FILE).touch()
        sleep(stop, seconds)

    monkeypatch.setattr(StopRequest, "sleep", asked)
    with pytest.raises(Preempted, match="between two attempts"):
        supervise(limited(config, backoff_seconds=600.0), "end=17", "end=0")
    assert endings(config) == [17]


def test_a_disk_that_is_nearly_full_is_said_once(config: RunConfig, supervise: Supervise) -> None:
    supervise(limited(config, disk_low_bytes=2**62), "sleep=0.3 end=17", "sleep=0.3 end=0")
    (low,) = journaled(config, DiskLow)
    assert 0 <= low.free_bytes < low.limit_bytes == 2**62


def test_a_kill_for_want_of_memory_is_said(
    config: RunConfig, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 5, 5, 5])
    monkeypatch.setattr(supervisor, "oom_kills", lambda: next(counts))
    supervise(config, "end=-9", "end=0")
    first, second = journaled(config, AttemptEnded)
    assert first.reason == "the kernel killed 2 processes for want of memory: killed by SIGKILL"
    assert (first.oom_kills, second.oom_kills) == (2, 0)


@pytest.mark.parametrize("other", ["look", "end"])
def test_what_was_said_is_gathered_while_an_attempt_runs_and_when_it_has_ended(
    config: RunConfig, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(LogStream, other, lambda stream: None)

    def watch() -> None:
        attempt = len(endings(config)) + 1
        streamed, log = stream_path(config.run_dir / "logs", attempt), driver_process.log_path(config, attempt)
        if (streamed if other == "end" else log).stat().st_size:
            (config.run_dir / f"enough-{attempt}").touch()

    supervise(config, "save=1 until=enough-1 end=17", "until=enough-2 end=0", watch=watch)
    for attempt in (1, 2):
        (line,) = stream_path(config.run_dir / "logs", attempt).read_bytes().splitlines()
        said = json.loads(line)
        assert (said["attempt"], said["process"], said["line"]) == (attempt, "driver", "error: said by the driver")


def test_the_config_is_kept_for_resume(
    config: RunConfig, supervise: Supervise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    supervise(config.model_copy(update={"run_dir": Path("run")}), "end=0")
    recorded = recorded_run(tmp_path / "run")
    assert recorded.config == config.model_copy(update={"run_dir": tmp_path / "run"})
    assert Path(recorded.directory) == tmp_path
    with pytest.raises(ConfigError, match=r"no config.json there"):
        recorded_run(tmp_path)


def test_the_config_that_is_kept_is_the_one_that_the_run_accepted(config: RunConfig, supervise: Supervise) -> None:
    supervise(config, "end=0")
    refused, accepted = limited(config, grace_seconds=1.0), limited(config, grace_seconds=2.0)
    with pytest.raises(RunMismatch):
        supervise(refused, "", "refuse=11", "end=0")
    assert recorded_run(config.run_dir).config.supervision == config.supervision
    supervise(accepted, "", "end=0")
    assert recorded_run(config.run_dir).config.supervision == accepted.supervision


@pytest.mark.parametrize("faults", [False, True])
def test_a_run_that_is_to_meet_faults_is_traced(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: bool
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"faults": []}')
    given: dict[str, str] = {}
    monkeypatch.delenv("HARNESS_TRACE", raising=False)
    monkeypatch.setattr(driver_process, "spawn", lambda command, env, log, ledger: given.update(env))
    driver_process.start_driver(config, [], 1, plan if faults else None, {})
    assert given.get("HARNESS_TRACE") == (str(trace_folder(config.run_dir)) if faults else None)


@pytest.mark.parametrize(
    ("address", "grace", "seconds"), [("local", 5.0, "20"), ("local", 44.5, "45"), ("auto", 5.0, None)]
)
def test_a_driver_soon_sees_that_a_head_of_its_own_is_lost(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, address: str, grace: float, seconds: str | None
) -> None:
    """Ray's own name for it. Not while it may still have to save what it can."""
    given: dict[str, str] = {}
    monkeypatch.setattr(driver_process, "spawn", lambda command, env, log, ledger: given.update(env))
    config = limited(config, grace_seconds=grace).model_copy(update={"ray_address": address})
    driver_process.start_driver(config, [], 1, None, {})
    assert given.get("RAY_gcs_rpc_server_reconnect_timeout_s") == seconds
