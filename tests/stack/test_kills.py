"""Two ranks meet every fault that this machine allows and no other test has; afterwards every step is bit-identical."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaos import disks, faults
from chaos.plan import PlannedFault
from chaos.recovery import parts, recoveries
from chaos.verdict import compare
from checkpointing.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRejected,
    FaultWitnessed,
    RunFinished,
    SaveFailed,
    StepDone,
)
from checkpointing.journal import Record, read_journal
from checkpointing.settings import Checkpoints
from checkpointing.trace import read_trace, trace_folder
from harness.config import Metrics, RunConfig
from harness.engines import EnginePool
from harness.exporter import TOKEN
from harness.faulted import meet, small_disk, write_plan
from harness.processes import free_port
from tests.prometheus import every_query_has_data

from .conftest import STEPS_PER_EPOCH, assert_no_secret_of_any_process


def fault(name: str, target: str, at: str, step: int | None, **more: Any) -> PlannedFault:
    return PlannedFault(fault=name, target=target, at=at, step=step, **more)


DISK_BYTES = 1 << 28

POWER_CUT = (
    fault("lost_writes", "store:file", "save.before_commit", 9)
    if disks.why_not() is None
    else fault("kill", "driver", "save.before_commit", 9)
)
"""In the middle of the second epoch: shards are there and their commit is not."""

# What happens to requests lasts for longer than a busy machine takes to make one.
GAUNTLET = (
    fault("kill", "driver", "generate.request", 1, nth=5),  # before the first commit: nothing to resume from
    fault("engine_slow", "engine:0", "generate.begin", 2, seconds=5, parameters={"delay": 1}),
    fault("s3_slow", "store:s3", "save.begin", 2, seconds=8, parameters={"delay": 1}),
    fault("kill", "policy:0", "train.optimizer", 3, nth=2),  # between the two optimizer steps of one batch
    fault("engine_error", "engine:0", "generate.begin", 4, seconds=5),
    fault("kill", "driver", "step.trained", 4),  # after the optimizer, before the save
    fault("kill", "driver", "save.committed", 5),  # end of the first epoch: the next must run in full
    fault("engine_error", "engine:0", "generate.begin", 6, seconds=8, parameters={"answer": "half"}),
    fault("s3_slow_down", "store:s3", "save.begin", 6, seconds=8),
    fault("memory_limit", "policy:1", "train.forward_backward", 7),
    fault("engine_unreachable", "engine:0", "generate.begin", 8, seconds=5),
    POWER_CUT,
    fault("non_finite_gradient", "policy:1", "train.optimizer", 10),  # goes back one more checkpoint
    fault("s3_expired", "store:s3", "save.begin", 11, seconds=8),
    fault("straggle", "policy:1", "train.forward_backward", 11, seconds=4),
    fault("store_slow", "store:file", "save.begin", 11, seconds=4),
    fault("cut_off_rank", "policy:1", "train.forward_backward", 12, seconds=3),
    fault("flip_blob", "store:file", "save.committed", 12),
    fault("kill", "driver", "train.begin", 13),  # and that blob is read from another tier
    fault("kill", "keeper:0", "save.shard_written", 14),  # no reason to stop: the save is tried again
    fault("read_only", "store:file", "save.begin", 15, seconds=3),  # nor the last one, after the last step
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


def test_every_kind_of_fault_in_one_run(
    baseline: list[Record],
    configure: Callable[..., RunConfig],
    engines: EnginePool,
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    checkpoints, metrics = Checkpoints(tiers=("memory://", "file://", s3_url)), Metrics(port=free_port())
    config = configure("gauntlet").model_copy(update={"checkpoints": checkpoints, "metrics": metrics})
    planned = [one for one in GAUNTLET if faults.find(one.fault).available() is None]
    can = {one.fault for one in planned}  # a machine may let nobody mount, or make control groups
    disk = DISK_BYTES if disks.why_not() is None else None
    with small_disk(config.run_dir, disk), every_query_has_data(metrics.port, tmp_path):
        plan = write_plan(config, tuple(planned), config.run_dir / "faults")
        meet(config, plan, engines, Console(quiet=True))
    killed = read_journal(config.run_dir)
    verdict = compare(baseline, killed)
    assert verdict.outcome == "identical", verdict.reasons
    witnessed = {record.event.index for record in killed if isinstance(record.event, FaultWitnessed)}
    assert witnessed == set(range(len(planned)))
    first = next(record.event for record in killed if isinstance(record.event, StepDone))
    assert 0 < first.tokens_reused < first.tokens_generated, (
        "what was finished when it was killed is not generated again"
    )
    resumed = attempts(killed)
    at_limit = resumed[5:-3]
    assert [*resumed[:5], *resumed[-3:]] == [None, None, 2, 3, 5, 8, 8, 12]
    # At its limit a process dies when it next takes memory: in that step, or in the next after its save.
    assert at_limit in ([[6], [7]] if "memory_limit" in can else [[]])
    assert STEPS_PER_EPOCH in resumed, "one resume was exactly at the end of an epoch"
    assert len(recoveries(killed)) == len(resumed) - 1, "a keeper's death ends no attempt"
    rejected = [record.event.step for record in killed if isinstance(record.event, CheckpointRejected)]
    assert rejected == [9], (
        "after a NaN the newest is not trusted; one that is damaged on one tier is read from another"
    )
    failed = [record.event.step for record in killed if isinstance(record.event, SaveFailed)]
    assert {step for step in failed if step > 13} == {14} | ({15} if "read_only" in can else set())
    committed = [record.event.step for record in killed if isinstance(record.event, CheckpointCommitted)]
    assert committed[-2:] == [14, 15], "and both saves were made good"
    trace = read_trace(trace_folder(config.run_dir))
    assert {mark.process for mark in trace} >= {"driver", "policy:0", "policy:1", "keeper:0"}
    begins = [parts(killed, recovery.attempt, trace)[0].name for recovery in recoveries(killed)]
    assert set(begins) == {"detect"}, "the trace holds the place of every fault"
    assert_no_secret_of_any_process(config.run_dir)
