"""Saves behind training on a real Ray: two nodes, a keeper on each, and ranks that hold a tensor instead of a model."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from checkpointing.blobs import get_blob
from checkpointing.commit import start_attempt
from checkpointing.errors import CorruptBlob, DivergenceError, StoreError
from checkpointing.events import CheckpointCommitted, Event, RetentionFailed, SaveFailed, SaveSkipped
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import Entry as ManifestEntry
from checkpointing.manifest import Manifest, Shard
from checkpointing.settings import Checkpoints
from checkpointing.staging import Staged, StagingBuffer
from checkpointing.store import open_store
from checkpointing.stores.memory import RAM
from checkpointing.tensors import unpack_tensors
from trainer.captured import Captured
from trainer.driver_state import capture_step, restore_step
from trainer.keeper import WRITERS, sources, start_keepers
from trainer.run import Run
from trainer.saving import Saver
from trainer.staging import stage_entries
from trainer.state import Entry

NODES = ("one", "two")
PARAMETERS = Entry("policy/parameters", lambda owner: Captured({"w": owner.weight}, {}), lambda owner, captured: None)
STATE = [PARAMETERS, Entry("driver/global_step", capture_step, restore_step)]


class FakeRank:
    """A rank whose whole State is one tensor."""

    def __init__(self, rank: int) -> None:
        self._rank, self._buffer = rank, StagingBuffer()
        self.weight = torch.full((100_000,), float(rank))

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def fill(self, value: float) -> None:
        self.weight.fill_(value)

    def stage_state(self, step: int) -> Staged:
        return stage_entries([PARAMETERS], self, self._buffer, self._rank, step)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Any]]:
    """Two raylets that take themselves for nodes of their own, with a rank on each."""
    made = Cluster()
    for index, name in enumerate(NODES):
        made.add_node(num_cpus=2, resources={name: 1}, env_vars={"HARNESS_NODE": name}, include_dashboard=False)
        if index == 0:
            ray.init(address=made.address, log_to_driver=False)
    rank = ray.remote(FakeRank)
    ranks = [rank.options(num_cpus=1, resources={name: 1}).remote(index) for index, name in enumerate(NODES)]
    ray.get([actor.node_id.remote() for actor in ranks])
    yield ranks
    ray.shutdown()
    made.shutdown()


class Training:
    """What a `Saver` needs of a trainer, and a run that it saves into."""

    def __init__(self, directory: Path, ranks: list[Any], settings: Checkpoints) -> None:
        tiers = settings.open(directory)
        attempt = start_attempt(tiers, None)
        self.run = Run(
            directory=directory,
            urls=settings.urls(directory),
            settings=settings,
            tiers=tiers,
            journal=Journal(directory, "driver", 1),
            attempt=attempt,
            resumed=None,
            identity={},
            topology={"policy": len(ranks)},
            steps_before={},
            evaluated_before=set(),
        )
        self.ranks = ranks
        self.dispatch = SimpleNamespace(_actor_groups={"policy": SimpleNamespace(_actor_handlers=ranks)})
        self.cfg = SimpleNamespace(trainer=None)
        self.global_step = 0
        self.nodes = {"policy": ray.get([rank.node_id.remote() for rank in ranks])}
        self.start_keepers()
        self.saver = Saver(self, self.run)

    def start_keepers(self) -> None:
        self.keepers = start_keepers(self.run.urls, self.nodes["policy"])
        pids = [keeper.__ray_call__.remote(lambda keeper: os.getpid()) for keeper in self.keepers.values()]
        self.processes = [psutil.Process(pid) for pid in ray.get(pids)]

    def fill(self, value: float) -> None:
        ray.get([rank.fill.remote(value) for rank in self.ranks])

    def events[E: Event](self, kind: type[E]) -> list[E]:
        return [record.event for record in read_journal(self.run.directory) if isinstance(record.event, kind)]

    def pause_keepers(self, how: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(how)


@pytest.fixture
def training(
    cluster: list[Any], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    monkeypatch.setattr("trainer.state.STATE", STATE)
    made = Training(tmp_path, cluster, Checkpoints(**getattr(request, "param", {})))
    yield made
    for keeper in made.keepers.values():
        ray.kill(keeper)
    made.run.journal.close()
    for url in made.run.urls:
        if url.startswith("memory://"):
            shutil.rmtree(RAM / f"harness-{os.getuid()}" / url.removeprefix("memory://"), ignore_errors=True)


def break_storage(training: Training) -> Path:
    """Where blobs should go there is a file."""
    folder = training.run.directory / "store" / "blobs"
    if folder.exists():
        folder.rename(folder.with_name("blobs-away"))
    folder.parent.mkdir(exist_ok=True)
    folder.write_bytes(b"")
    return folder


def weights(training: Training) -> list[float]:
    """The first element of each rank's tensor in the newest checkpoint."""
    store = training.run.tiers.primary.store
    found, _ = newest_restorable(store)
    assert found
    blobs = [shard.tensors for shard in found[1].entries["policy/parameters"].shards]
    return [float(unpack_tensors(get_blob(store, blob))["w"][0]) for blob in blobs if blob]


def test_a_save_is_of_the_moment_of_the_copy(training: Training) -> None:
    training.pause_keepers(signal.SIGSTOP)
    training.saver.save(1, {}, last=False)
    training.fill(7.0)  # training goes on before anything is written
    assert training.events(CheckpointCommitted) == []
    training.pause_keepers(signal.SIGCONT)
    training.saver.finish()
    assert weights(training) == [0.0, 1.0]
    training.saver.save(2, {}, last=True)
    training.saver.finish()
    assert weights(training) == [7.0, 7.0]
    assert [event.step for event in training.events(CheckpointCommitted)] == [1, 2]
    for rank in training.ranks:
        ray.get(rank.fill.remote(0.0))


@pytest.mark.parametrize("training", [{"when_busy": "skip"}], indirect=True)
def test_a_busy_save_is_skipped_where_the_config_says_so_but_never_the_last(training: Training) -> None:
    training.pause_keepers(signal.SIGSTOP)
    training.saver.save(1, {}, last=False)
    training.saver.save(2, {}, last=False)
    assert training.events(SaveSkipped) == [SaveSkipped(step=2, in_flight=1)]
    training.pause_keepers(signal.SIGCONT)
    training.saver.save(3, {}, last=True)
    training.saver.finish()
    assert [event.step for event in training.events(CheckpointCommitted)] == [1, 3]


@pytest.mark.parametrize("training", [{"failing_seconds": 0}], indirect=True)
def test_saves_may_fail_as_often_as_the_config_says(training: Training) -> None:
    """A transient refusal killed the run (Ray #47939), and one that stays was never noticed (LichtFeld #717)."""
    break_storage(training)
    training.saver.save(1, {}, last=False)
    for _ in range(2):
        wait(training)
        training.saver.report()  # at the end of a step: said, and tried again
    assert [event.failures for event in training.events(SaveFailed)] == [1, 2]
    wait(training)
    with pytest.raises(StoreError, match="3 saves in a row failed"):
        training.saver.report()


@pytest.mark.parametrize("training", [{"failing_seconds": 3600}], indirect=True)
def test_saves_may_fail_for_as_long_as_the_config_says(training: Training) -> None:
    """Steps of two seconds used up three saves before a disk had room again; a run that is told to stop has no hour."""
    break_storage(training)
    training.saver.save(1, {}, last=False)
    for _ in range(4):
        wait(training)
        training.saver.report()
    assert [event.failures for event in training.events(SaveFailed)] == [1, 2, 3, 4]
    with pytest.raises(StoreError, match="5 saves in a row failed"):
        training.saver.last()


def test_a_save_that_failed_is_made_good(training: Training) -> None:
    folder = break_storage(training)
    training.saver.save(1, {}, last=False)
    wait(training)
    folder.unlink()
    training.saver.report()
    training.saver.finish()
    assert [event.failures for event in training.events(SaveFailed)] == [1]
    assert [event.step for event in training.events(CheckpointCommitted)] == [1]


def test_a_keeper_that_dies_costs_one_try(training: Training) -> None:
    """The save is made good by a new keeper from the same buffers, although training has gone on."""
    training.pause_keepers(signal.SIGSTOP)
    training.fill(3.0)
    training.saver.save(1, {}, last=False)
    training.fill(4.0)
    training.pause_keepers(signal.SIGKILL)
    wait(training)
    training.saver.report()
    training.saver.finish()
    assert [event.failures for event in training.events(SaveFailed)] == [1]
    assert [event.step for event in training.events(CheckpointCommitted)] == [1]
    assert weights(training) == [3.0, 3.0]


def test_nothing_is_staged_over_a_buffer_that_is_still_read(training: Training) -> None:
    """One keeper has failed and another is slow: the save has not ended before both have."""
    training.pause_keepers(signal.SIGSTOP)
    training.saver.save(1, {}, last=False)
    training.processes[0].kill()
    assert training.saver._in_flight is not None
    future = training.saver._in_flight[1]
    with pytest.raises(TimeoutError):
        future.result(3.0)
    training.processes[1].send_signal(signal.SIGCONT)
    assert future.exception() is not None
    training.saver.finish()
    assert [event.step for event in training.events(CheckpointCommitted)] == [1]


def test_what_can_not_be_deleted_does_not_fail_a_save(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: int) -> None:
        raise StoreError("read-only")

    with monkeypatch.context() as patched:
        patched.setattr(training.saver._upkeep, "after_commit", refuse)
        training.saver.save(1, {}, last=False)
        training.saver.finish()
    assert [event.reason for event in training.events(RetentionFailed)] == ["read-only"]
    assert training.events(SaveFailed) == []
    training.saver.save(2, {}, last=True)
    training.saver.finish()
    assert [event.step for event in training.events(CheckpointCommitted)] == [1, 2]


@pytest.mark.parametrize("training", [{"tiers": ("memory://", "file://")}], indirect=True)
def test_memory_that_could_not_be_given_back_is_told(training: Training) -> None:
    training.saver.save(1, {}, last=True)
    training.saver.finish()
    assert training.events(RetentionFailed) == []
    training.pause_keepers(signal.SIGKILL)
    training.saver.finish()
    assert [event.tier for event in training.events(RetentionFailed)] == ["memory"] * len(NODES)


@pytest.mark.parametrize("training", [{"failing_seconds": 0}], indirect=True)
def test_no_run_ends_well_with_a_save_lost(training: Training) -> None:
    """The last save raised in the background and nobody looked: exit 0 and no checkpoint (VeOmni #1162)."""
    break_storage(training)
    training.saver.save(1, {}, last=True)
    with pytest.raises(StoreError, match="3 saves in a row failed"):
        training.saver.finish()


@pytest.mark.parametrize("training", [{"failing_seconds": 0}], indirect=True)
def test_no_space_left(training: Training) -> None:
    """A real ENOSPC: where blobs should go there is a file system of 256 KiB."""
    blobs = training.run.directory / "store" / "blobs"
    blobs.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(blobs)], check=False).returncode:
        pytest.skip("this user can't mount a small file system")
    try:
        training.saver.save(1, {}, last=True)
        with pytest.raises(StoreError, match="No space left"):
            training.saver.finish()
    finally:
        subprocess.run(["umount", "-l", str(blobs)], check=True)


def test_an_attempt_that_failed_keeps_its_last_save_but_does_not_wait_for_ever(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.saver.save(1, {}, last=False)
    training.saver.abandon()
    assert [event.step for event in training.events(CheckpointCommitted)] == [1]
    training.pause_keepers(signal.SIGSTOP)
    monkeypatch.setattr("trainer.saving.ABANDON_AFTER", 0.01)
    training.saver.save(2, {}, last=False)
    training.saver.abandon()
    assert [event.step for event in training.events(CheckpointCommitted)] == [1]
    training.pause_keepers(signal.SIGCONT)
    training.saver.finish()


def test_what_is_staged_must_be_what_the_step_left_behind(training: Training) -> None:
    shards = [Shard(rank=rank, tensors=None, data=None, tensor_digests={}) for rank in range(2)]
    other = ManifestEntry.of("policy/parameters", shards)
    training.saver.save(1, {"policy/parameters": other}, last=True)
    with pytest.raises(DivergenceError, match="step 1: what was staged of policy/parameters"):
        training.saver.finish()
    assert valid_commits(training.run.tiers.primary.store) == []


def wait(training: Training) -> None:
    """Until the save in flight has ended, well or not."""
    assert training.saver._in_flight is not None
    training.saver._in_flight[1].exception()


def manifest_of(training: Training) -> Manifest:
    found, _ = newest_restorable(training.run.tiers.primary.store)
    assert found
    return found[1]


@pytest.mark.parametrize("training", [{"tiers": ("memory://", "file://")}], indirect=True)
def test_a_lost_node_restores_from_its_peer(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        training.fill(float(step))
        training.saver.save(step, {}, last=False)
        training.saver._settle()
    name = training.run.urls[0].removeprefix("memory://")
    nodes = {node: RAM / f"harness-{os.getuid()}" / name / node for node in NODES}
    blobs = [shard.tensors for shard in manifest_of(training).entries["policy/parameters"].shards]
    keys = {blob.key for blob in blobs if blob}
    for folder in nodes.values():
        held = {item.key for item in open_store(str(folder)).list("blobs/")}
        assert keys <= held, "each node has its own and its peer's"
        assert len(held) <= len(keys) + 2, "and the newest checkpoint's alone"

    shutil.rmtree(training.run.directory / "store" / "blobs")  # so that nothing else can have it
    shutil.rmtree(nodes["one"])
    monkeypatch.setenv("HARNESS_NODE", "one")
    keepers = list(training.keepers.values())
    for blob in blobs:
        assert blob and get_blob(sources(training.run.urls, keepers[1:]), blob)
        with pytest.raises(CorruptBlob, match="is missing"):
            get_blob(sources(training.run.urls, []), blob)
    monkeypatch.setenv("HARNESS_NODE", "two")
    for blob in blobs:
        assert blob and get_blob(sources(training.run.urls, []), blob), "a lost process restores from its own node"
    training.saver.finish()
    assert open_store(str(nodes["two"])).list("") == [], "memory is given back when the run has ended"


@pytest.mark.parametrize("training", [{"tiers": ("memory://", "file://")}], indirect=True)
def test_keepers_do_not_wait_for_each_other_for_ever(training: Training) -> None:
    """As many shards at once as a keeper has threads, on both nodes: each needs the other to take its copy."""
    staged = ray.get([rank.stage_state.remote(1) for rank in training.ranks])
    keepers = training.keepers.values()
    calls = [keeper.write.remote(one) for keeper, one in zip(keepers, staged, strict=True) for _ in range(3 * WRITERS)]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=60)
    assert len(done) == len(calls)
    ray.get(calls)
