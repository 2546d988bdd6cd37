"""Which attempt a driver may become: the one it was started as, or the next after its own."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import trainer.run
from checkpointing.errors import Fenced
from checkpointing.events import AttemptStarted, Event, StepDone
from checkpointing.settings import Checkpoints
from trainer.run import Run, open_run, steps_to_repeat

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


def done(step: int, attempt: int) -> StepDone:
    said = {"attempt": str(attempt)}
    return StepDone(
        step=step, epoch=0, seconds=0, digest_seconds=0, state={}, data=said, scalars={}, zero_advantages=False
    )


def began(world_size: int, resumed_from: int | None) -> AttemptStarted:
    return AttemptStarted(pid=1, resumed_from=resumed_from, world_size=world_size)


def to_repeat(*attempts: tuple[AttemptStarted, int]) -> dict[int, int]:
    """{step: attempt whose outcome counts}, as the last of `attempts` sees it: (beginning, last step done) each."""
    events: list[Event] = []
    for attempt, (begins, last) in enumerate(attempts[:-1], 1):
        events += [begins, *(done(step, attempt) for step in range((begins.resumed_from or 0) + 1, last + 1))]
    now = attempts[-1][0]
    steps = steps_to_repeat(events, now.resumed_from or 0, now.world_size)
    return {step: int(event.data["attempt"]) for step, event in steps.items()}


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        pytest.param([(began(2, None), 2), (began(2, 1), 0)], {1: 1, 2: 1}, id="the same ranks"),
        pytest.param([(began(2, None), 2), (began(1, 1), 0)], {1: 1}, id="a rank fewer"),
        pytest.param([(began(2, None), 2), (began(1, 1), 4), (began(1, 3), 0)], {1: 1, 2: 2, 3: 2, 4: 2}, id="again"),
        pytest.param([(began(2, None), 2), (began(1, 1), 4), (began(2, 3), 0)], {1: 1, 2: 2, 3: 2}, id="all back"),
        pytest.param([(began(2, None), 3), (began(1, 3), 4), (began(1, 2), 0)], {1: 1, 2: 1}, id="to before it"),
        pytest.param(
            [(began(2, None), 3), (began(1, 3), 5), (began(2, 5), 7), (began(2, 3), 0)],
            {1: 1, 2: 1, 3: 1},
            id="all back and to before it",
        ),
    ],
)
def test_steps_of_other_ranks_need_not_come_out_the_same(
    attempts: list[tuple[AttemptStarted, int]], expected: dict[int, int]
) -> None:
    assert to_repeat(*attempts) == expected
