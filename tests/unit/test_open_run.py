"""Which attempt a driver may become: the one it was started as, or the next after its own."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import trainer.run
from checkpointing.errors import Fenced
from checkpointing.settings import Checkpoints
from trainer.run import Run, open_run

CFG = SimpleNamespace(trainer=SimpleNamespace(seed=1, resume_mode="latest"))


@pytest.fixture(autouse=True)
def anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.run, "identity", lambda cfg, dataset: {"config": "c0ffee"})
    monkeypatch.setattr(trainer.run, "topology", lambda cfg: {"policy": 1})
    monkeypatch.setattr(trainer.run, "get_config_as_dict", lambda cfg: {})


def opened(directory: Path, after: int | None = None) -> Run:
    return open_run(directory, Checkpoints(), CFG, "dataset", 3, after)


def test_a_driver_that_slept_does_not_take_the_run_from_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_ATTEMPT", "1")
    assert opened(tmp_path).attempt.attempt == 1
    with pytest.raises(Fenced, match="attempt 1 of this run was started by another process"):
        opened(tmp_path)


def test_a_driver_becomes_the_next_attempt_after_its_own_unless_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_ATTEMPT", "1")
    assert opened(tmp_path).attempt.attempt == 1
    assert opened(tmp_path, after=1).attempt.attempt == 2
    with pytest.raises(Fenced, match="attempt 2"):
        opened(tmp_path, after=1)


def test_without_a_supervisor_whoever_starts_last_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_ATTEMPT", raising=False)
    assert [opened(tmp_path).attempt.attempt for _ in range(2)] == [1, 2]
