"""SIGKILL at every kind of moment; afterwards every later step must be bit-identical to the uninterrupted run."""

from typing import Any

from chaos.recovery import recoveries
from chaos.verdict import compare
from checkpointing.events import AttemptStarted, CheckpointCommitted, FaultWitnessed, RunFinished, StepDone
from checkpointing.journal import Record

from .conftest import STEPS_PER_EPOCH, Train


def kill(target: str, at: str, step: int | None, nth: int = 1) -> dict[str, Any]:
    return {"fault": "kill", "target": target, "at": at, "step": step, "nth": nth}


GAUNTLET = (
    kill("driver", "generate.request", step=1, nth=5),  # before the first commit: nothing to resume from
    kill("policy:1", "train.forward_backward", step=2),
    kill("policy:0", "train.optimizer", step=3, nth=2),  # between the two optimizer steps of one batch
    kill("driver", "step.trained", step=4),  # after the optimizer, before the save
    kill("driver", "save.committed", step=5),  # end of the first epoch: the next must run in full
    kill("policy:1", "save.capture", step=6),
    kill("policy:0", "save.shard_written", step=7, nth=2),
    kill("driver", "save.before_manifest", step=8),  # in the middle of the second epoch
    kill("driver", "save.before_commit", step=9),
    kill("driver", "store.create_written", step=10),  # the commit is on disk under its temporary name
    kill("driver", "weight_sync.begin", step=11),
    # Three in a row, the second and third while the first is being recovered from.
    kill("policy:1", "train.optimizer", step=13),
    kill("driver", "restore.begin", step=12),
    kill("driver", "restore.end", step=12),
)


def attempts(records: list[Record]) -> list[int | None]:
    return [record.event.resumed_from for record in records if isinstance(record.event, AttemptStarted)]


def test_baseline_proves_something(baseline: list[Record]) -> None:
    steps = [record.event for record in baseline if isinstance(record.event, StepDone)]
    assert [step.step for step in steps] == list(range(1, 16))
    assert [step.epoch for step in steps] == [0] * 5 + [1] * 5 + [2] * 5
    assert not all(step.zero_advantages for step in steps)
    assert len({step.state["policy/parameters"] for step in steps}) > 10
    assert any(isinstance(record.event, RunFinished) for record in baseline)
    assert sum(isinstance(record.event, CheckpointCommitted) for record in baseline) == 15


def test_every_kind_of_kill_in_one_run(baseline: list[Record], train: Train) -> None:
    killed = train("gauntlet", GAUNTLET)
    verdict = compare(baseline, killed)
    assert verdict.outcome == "identical", verdict.reasons
    witnessed = {record.event.index for record in killed if isinstance(record.event, FaultWitnessed)}
    assert witnessed == set(range(len(GAUNTLET)))
    assert attempts(killed) == [None, None, 1, 2, 3, 5, 5, 6, 7, 8, 9, 11, 12, 12, 12]
    assert STEPS_PER_EPOCH in attempts(killed), "one resume was exactly at the end of an epoch"
    assert len(recoveries(killed)) == len(GAUNTLET)
