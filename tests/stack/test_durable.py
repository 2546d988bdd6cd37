"""Real runs lose what their checkpoints lie on: an object store for a while, a file system for good, a single byte."""

import shutil
from collections.abc import Callable
from pathlib import Path

from chaos.plan import FaultPlan
from chaos.proxy import FOREVER, FaultProxy, Rule
from chaos.verdict import compare
from checkpointing.events import (
    AttemptStarted,
    CheckpointCommitted,
    CheckpointRejected,
    CheckpointReplicated,
    CheckpointsPruned,
    Event,
    ReplicationFailed,
    StateRestored,
    TopologyChanged,
)
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.journal import JournalFollower, Record, read_journal
from checkpointing.manifest import get_manifest
from checkpointing.retention import Keep
from checkpointing.settings import Checkpoints
from checkpointing.store import open_store
from checkpointing.stores.memory import node_folder
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.supervisor import supervise

from .conftest import run_until_killed

Configure = Callable[..., RunConfig]


def plan_kills(config: RunConfig, *steps: int) -> Path:
    """Kill the driver at the beginning of each of `steps`."""
    kills = [{"fault": "kill", "target": "driver", "at": "generate.begin", "step": step} for step in steps]
    plan = config.run_dir / "faults" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text(FaultPlan.model_validate({"faults": kills}).model_dump_json())
    return plan


def events[E: Event](records: list[Record], kind: type[E]) -> list[E]:
    return [record.event for record in records if isinstance(record.event, kind)]


def test_s3_is_away_then_everything_else_is_lost_then_a_rank(
    baseline: list[Record], configure: Configure, engines: EnginePool, s3_url: str, fault_proxy: FaultProxy
) -> None:
    """S3 is down from its second checkpoint on; at step 9 everything but S3 is gone, where a byte of what rank 1 saved
    has flipped: both ranks go back to the first. At step 12 one rank takes over alone."""
    checkpoints = Checkpoints(tiers=("memory://", "file://", s3_url), keep={"file": Keep(newest=2)}, backlog=3)
    config = configure("durable").model_copy(update={"checkpoints": checkpoints})
    alone = configure("durable", **{"trainer.placement.policy_num_gpus_per_node": 1})
    alone = alone.model_copy(update={"checkpoints": checkpoints})
    followed, outage, plan = JournalFollower(config.run_dir), list[Rule](), plan_kills(config, 9, 12)
    carried: list[int] = []

    def break_s3_once_it_has_two() -> None:
        carried.extend(event.step for event in events(followed.new(), CheckpointReplicated))
        if len(carried) >= 2 and not outage:
            outage.append(fault_proxy.add("status", times=FOREVER))

    run_until_killed(config, engines, plan, break_s3_once_it_has_two)
    records = read_journal(config.run_dir)
    carried = [event.step for event in events(records, CheckpointReplicated)]
    assert len(carried) >= 2 and max(carried) < 8 and outage[0].fired, "S3 was down, and was asked"
    assert len(events(records, ReplicationFailed)) <= 1, "said once per outage, after a minute of trying"
    assert max(event.step for event in events(records, CheckpointCommitted)) == 8, "and nothing waited for it"
    near = open_store(str(config.run_dir / "store"))
    kept = [found.step for found in valid_commits(near)]
    assert kept[:3] == [8, 7, 6] and len(kept) <= 4, "what S3 still waits for stays, as far as the backlog goes"
    assert events(records, CheckpointsPruned)

    fault_proxy.reset()
    shutil.rmtree(config.run_dir / "store")
    shutil.rmtree(node_folder(checkpoints.urls(config.run_dir)[0].removeprefix("memory://")))
    flip_a_byte_of(s3_url, "policy/optimizer", rank=1)
    run_until_killed(config, engines, plan)
    supervise(alone, engines)

    records = read_journal(config.run_dir)
    newest, before = sorted(carried, reverse=True)[:2]
    rejected = events(records, CheckpointRejected)
    assert [(event.step, event.role, event.rank) for event in rejected] == [(newest, "policy", 1)]
    assert "blobs/" in rejected[0].reason and "(s3)" in rejected[0].reason
    assert [event.resumed_from for event in events(records, AttemptStarted)] == [None, newest, before, 11]
    assert [event.step for event in events(records, StateRestored)] == [before, 11]
    assert events(records, TopologyChanged) == [TopologyChanged(step=11, before={"policy": 2}, after={"policy": 1})]
    verdict = compare(baseline, records)
    assert verdict.outcome == "inconclusive" and verdict.first_difference is None, verdict.reasons
    assert any("topology changed" in reason for reason in verdict.reasons)
    assert verdict.steps_compared == 15
    found, _ = newest_restorable(open_store(s3_url))
    assert found and found[0].step == 15, "a run that has ended is durable"


def flip_a_byte_of(url: str, entry: str, rank: int) -> None:
    """Of the newest commit's tensors of `entry` that `rank` holds."""
    store = open_store(url)
    manifest = get_manifest(store, valid_commits(store)[0].manifest)
    blob = manifest.entries[entry].shards[rank].tensors
    assert blob is not None
    data = bytearray(store.get(blob.key))
    data[-1] ^= 1
    store.delete(blob.key)
    store.put(blob.key, bytes(data))
