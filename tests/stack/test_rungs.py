"""What is lost is replaced and nothing more, whatever it was and however it went; and the run stays the same run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chaos.plan import PlannedFault
from chaos.verdict import compare
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    EngineLost,
    EngineServing,
    Event,
    FaultWitnessed,
    HangDetected,
    StepDone,
    TopologyChanged,
)
from checkpointing.journal import JournalFollower, Record, read_journal
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.faulted import meet, write_plan
from harness.supervisor import supervise

Configure = Callable[..., RunConfig]

FAULTS = (
    PlannedFault(fault="kill", target="engine:0", at="generate.request", step=2, nth=5),
    # An engine that hangs, and a rank that dies as soon as it is back.
    PlannedFault(fault="stop", target="engine:0", at="generate.begin", step=4),
    PlannedFault(fault="kill", target="policy:1", at="train.forward_backward", step=4),
    # Three in a row: a rank dies, the driver dies in the restore that follows, and then a rank hangs.
    PlannedFault(fault="kill", target="policy:0", at="train.forward_backward", step=7),
    PlannedFault(fault="kill", target="driver", at="restore.end", step=6),
    PlannedFault(fault="stop", target="policy:1", at="train.optimizer", step=7),
    # A save that takes longer than a step may: no hang.
    PlannedFault(fault="stop", target="keeper:0", at="save.shard_written", step=9, seconds=25),
    PlannedFault(fault="stop", target="driver", at="generate.begin", step=11),
)
SILENCE = 12.0


def events[E: Event](records: list[Record], kind: type[E]) -> list[E]:
    return [record.event for record in records if isinstance(record.event, kind)]


def limited(config: RunConfig, **limits: Any) -> RunConfig:
    return config.model_copy(update={"supervision": config.supervision.model_copy(update=limits)})


def test_engines_ranks_and_drivers_that_die_or_hang(
    baseline: list[Record], configure: Configure, engines: EnginePool
) -> None:
    config = limited(
        configure("rungs", **{"trainer.logger": "tensorboard"}), phase_seconds=20.0, engine_seconds=SILENCE
    ).model_copy(update={"ray_address": "local"})  # each driver starts one, as most people's do
    meet(config, write_plan(config, FAULTS, config.run_dir / "faults"), engines, Console(quiet=True))
    records = read_journal(config.run_dir)
    verdict = compare(baseline, records)
    assert verdict.outcome == "identical", verdict.reasons
    assert {event.index for event in events(records, FaultWitnessed)} == set(range(len(FAULTS)))

    lost = events(records, EngineLost)
    assert [event.reason.partition(",")[0][:15] for event in lost] == ["engine 0 ended ", "engine 0 answer"]
    assert len(events(records, EngineServing)) == 2
    ended = events(records, AttemptEnded)
    how = [(event.step, event.exit_code, event.signal, event.in_place) for event in ended]
    assert how[0] == (4, 17, None, True), "no engine ended an attempt; a rank was replaced without a new driver"
    hangs = [(event.step, event.phase) for event in events(records, HangDetected)]
    assert hangs == [(7, "train"), (11, "generate")]
    assert [event.resumed_from for event in events(records, AttemptStarted)] == [None, 3, 6, 6, 6, 10]
    assert ended[-1].exit_code == 0 and len(ended) == 6

    curve = EventAccumulator(str(config.run_dir / "tensorboard"))
    curve.Reload()
    rewards = curve.Scalars("reward/avg_raw_reward")
    assert [point.step for point in rewards] == list(range(1, 16)), "no step is lost, repeated or out of order"
    float32 = [float.fromhex(step.scalars["reward/avg_raw_reward"]) for step in events(baseline, StepDone)]
    assert [point.value for point in rewards] == pytest.approx(float32, rel=1e-6)


class Nodes:
    """A head without a GPU and two nodes with one each: raylets of their own."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self.nodes = [self.add(), self.add()]

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=2, num_gpus=1)

    def lose(self) -> None:
        """The youngest node's raylet is killed, and everything on it."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    ray.shutdown()
    made.cluster.shutdown()


def test_a_node_that_stays_away_is_done_without(
    baseline: list[Record], configure: Configure, engines: EnginePool, nodes: Nodes
) -> None:
    """Lost at step 3 it is waited for in vain, and the run goes on with one rank. One that is back: test_mission.py."""
    placement = {"trainer.placement.policy_num_nodes": 2, "trainer.placement.policy_num_gpus_per_node": 1}
    config = configure("nodes", **placement, **{"trainer.max_training_steps": 5})
    config = limited(config, node_wait_seconds=5.0, fewer_nodes=True)
    config = config.model_copy(update={"ray_address": nodes.cluster.address})
    followed = JournalFollower(config.run_dir)

    def watch() -> None:
        if len(nodes.nodes) == 2 and any(event.step == 2 for event in events(followed.new(), StepDone)):
            nodes.lose()

    supervise(config, engines, None, watch)
    records = read_journal(config.run_dir)
    (changed,) = events(records, TopologyChanged)
    assert changed.before == {"policy": 2} and changed.after == {"policy": 1} and changed.step in (1, 2, 3)
    before = [event for event in events(records, StepDone) if event.step <= changed.step]
    whole = {event.step: event.state for event in events(baseline, StepDone)}
    assert before and all(whole[event.step] == event.state for event in before), "with two: the same"
    assert [event.world_size for event in events(records, AttemptStarted)] == [2, 1]
    assert events(records, StepDone)[-1].step == 5
