"""What the supervisor does about each way a driver can end. The driver here only claims an attempt and ends."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointing.errors import AttemptsExhausted, ConfigError, DivergenceError, HarnessError
from checkpointing.events import AttemptEnded
from checkpointing.journal import read_journal
from harness import supervisor
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.processes import spawn

DRIVER = """
import os, signal, sys
from pathlib import Path
from checkpointing.commit import start_attempt
from checkpointing.store import open_store
run, ways = Path(sys.argv[1]), sys.argv[2].split(",")
attempt = start_attempt(open_store(f"file://{run / 'store'}"), None).attempt
way = int(ways[attempt - 1])
print("error: said by the driver", flush=True)
os.kill(os.getpid(), -way) if way < 0 else os._exit(way)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(run_dir=tmp_path / "run", device="cpu", max_attempts=3, skyrl={})


def supervise(config: RunConfig, monkeypatch: pytest.MonkeyPatch, ways: str) -> None:
    """Run attempts whose drivers end in the given ways: exit codes, or minus a signal."""

    def start(config: RunConfig, urls: list[str], attempt: int, faults: Path | None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", DRIVER, str(config.run_dir), ways]
        return spawn(command, os.environ, supervisor._log(config, attempt), supervisor._ledger(config))

    monkeypatch.setattr(supervisor, "_start_driver", start)
    supervisor.supervise(config, EnginePool(config, config.run_dir / "logs"))


def endings(config: RunConfig) -> list[int | None]:
    events = [record.event for record in read_journal(config.run_dir)]
    return [
        event.exit_code if event.signal is None else -event.signal
        for event in events
        if isinstance(event, AttemptEnded)
    ]


def test_a_killed_driver_and_a_lost_rank_are_followed_by_the_next_attempt(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervise(config, monkeypatch, "-9,17,0")
    assert endings(config) == [-9, 17, 0]


@pytest.mark.parametrize(("code", "kind"), [(10, ConfigError), (14, DivergenceError), (1, HarnessError)])
def test_an_error_of_the_users_is_not_tried_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[HarnessError]
) -> None:
    with pytest.raises(kind, match="said by the driver") as caught:
        supervise(config, monkeypatch, f"{code},0")
    assert caught.value.exit_code == code
    assert endings(config) == [code]


def test_attempts_are_limited(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttemptsExhausted, match="3 attempts"):
        supervise(config, monkeypatch, "17,17,17,0")
    assert endings(config) == [17, 17, 17]


def test_attempts_that_get_nowhere_end_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = config.model_copy(update={"max_attempts": 100})
    with pytest.raises(AttemptsExhausted, match="5 attempts in a row got no step further"):
        supervise(patient, monkeypatch, ",".join(["17"] * 100))
    assert endings(config) == [17] * supervisor.MAX_STALLED


def test_one_supervisor_a_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config.run_dir.mkdir()
    with (config.run_dir / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `harness run`"):
            supervise(config, monkeypatch, "0")
    supervise(config, monkeypatch, "0")
