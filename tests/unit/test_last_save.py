"""Asked to stop in the middle of a step, the run still commits the step before it, as it was when it ended."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from checkpointing.blobs import get_blob
from checkpointing.commit import start_attempt
from checkpointing.errors import DivergenceError, NonFinite, StoreError
from checkpointing.events import CheckpointCommitted, NonFiniteFound, SaveFailed
from checkpointing.history import newest_restorable
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import Entry as ManifestEntry
from checkpointing.manifest import Shard
from checkpointing.settings import Checkpoints
from checkpointing.signing import Signer
from checkpointing.staging import Staged, StagingBuffer, write_staged
from checkpointing.tensors import unpack_tensors
from trainer.captured import Captured
from trainer.driver_state import capture_step, restore_step
from trainer.finite import require_finite
from trainer.run import Run
from trainer.saving import Saver
from trainer.shards import digest_entries, not_finite
from trainer.staging import stage_entries
from trainer.state import Entry

PARAMETERS = Entry("policy/parameters", lambda owner: Captured({"w": owner.weight}, {}), lambda owner, captured: None)
STREAM = Entry("driver/rng", lambda owner: Captured({"s": owner.stream}, {}), lambda owner, captured: None)
STATE = [PARAMETERS, Entry("driver/global_step", capture_step, restore_step), STREAM]


class Here:
    """What stands for an actor: `actor.method.remote(...)` calls it at once."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._target, name))


class Rank:
    def __init__(self) -> None:
        self.weight, self._buffer = torch.zeros(1000), StagingBuffer()

    def stage_state(self, step: int) -> Staged:
        return stage_entries([PARAMETERS], self, self._buffer, 0, step)

    def not_finite(self) -> list[str]:
        return not_finite([PARAMETERS], self)

    def close(self) -> None:
        self._buffer.close()


class Training:
    """What a `Saver` needs of a trainer: one rank, whose tensor holds the number of the step it is after."""

    def __init__(self, directory: Path) -> None:
        settings = Checkpoints()
        tiers = settings.open(directory)
        journal, attempt = Journal(directory, "driver", 1), start_attempt(tiers, None)
        urls = settings.urls(directory)
        self.run = Run(directory, urls, settings, tiers, journal, attempt, None, {}, {"policy": 1}, {}, set())
        self.rank = Rank()
        group = SimpleNamespace(_actor_handlers=[Here(self.rank)])
        self.dispatch = SimpleNamespace(_actor_groups={"policy": group}, _ensure_on_gpu=lambda role: None)
        self.cfg, self.nodes = SimpleNamespace(trainer=None), {"policy": ["here"]}
        self.may_write = threading.Event()
        self.may_write.set()
        self.keepers = {"here": Here(SimpleNamespace(write=self.write))}
        self.global_step, self.stream = 0, torch.zeros(10)
        self.saver = Saver(self, self.run)

    def write(self, staged: Staged) -> dict[str, Shard]:
        self.may_write.wait()
        return write_staged(staged, [self.run.tiers.primary.store])

    def step(self, save: bool) -> None:
        """One step, up to where SkyRL syncs the weights."""
        self.global_step += 1
        self.rank.weight.fill_(float(self.global_step))
        self.stream.fill_(float(self.global_step))
        (shard,) = digest_entries([PARAMETERS], self.rank).values()
        expected = {"policy/parameters": ManifestEntry.of("policy/parameters", [shard])}
        if save:
            self.saver.save(self.global_step, expected, last=False)
        self.saver.remember(self.global_step, expected)

    @property
    def saved(self) -> tuple[int, int, float, float]:
        """Of the newest checkpoint: its step, the step that the driver had, the first element of each tensor."""
        store = self.run.tiers.primary.store
        found, _ = newest_restorable(store)
        assert found
        (policy,), (driver,), (stream,) = (found[1].entries[entry.name].shards for entry in STATE)
        assert policy.tensors and driver.data and stream.tensors
        weight = unpack_tensors(get_blob(store, policy.tensors))["w"][0]
        drawn = unpack_tensors(get_blob(store, stream.tensors))["s"][0]
        return found[1].step, json.loads(get_blob(store, driver.data))["global_step"], float(weight), float(drawn)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setattr("trainer.state.STATE", STATE)
    monkeypatch.setattr("ray.get", lambda answer: answer)
    monkeypatch.setattr("ray.wait", lambda answers, num_returns: (answers, []))
    made = Training(tmp_path)
    yield made
    made.saver._behind.shutdown()
    made.rank.close()
    made.run.journal.close()


def commits(training: Training) -> list[int]:
    events = [record.event for record in read_journal(training.run.directory)]
    return [event.step for event in events if isinstance(event, CheckpointCommitted)]


def test_the_finished_step_is_saved_although_the_next_has_begun(training: Training) -> None:
    training.step(save=True)
    training.step(save=False)
    training.global_step = 3  # the driver has moved on, the optimizer has not
    training.stream.fill_(3.0)
    assert training.saver.last() == 2
    assert training.saved == (2, 2, 2.0, 2.0)
    assert commits(training) == [1, 2]


def test_a_save_in_flight_is_left_as_it_was(training: Training) -> None:
    training.may_write.clear()
    training.step(save=True)
    training.step(save=False)
    training.may_write.set()
    training.saver.finish()
    assert training.saved == (1, 1, 1.0, 1.0)


def test_a_step_that_is_being_saved_is_not_saved_again(training: Training) -> None:
    training.step(save=True)
    assert training.saver.last() == 1
    assert commits(training) == [1]


def test_a_step_whose_parameters_have_moved_on_is_not_committed(training: Training) -> None:
    training.step(save=True)
    training.step(save=False)
    training.rank.weight.fill_(2.5)
    with pytest.raises(DivergenceError, match="step 2: what was staged of policy/parameters"):
        training.saver.last()
    assert training.saver.newest == 1
    assert training.saved == (1, 1, 1.0, 1.0)


def test_nothing_was_trained(training: Training) -> None:
    assert training.saver.last() == 0
    assert commits(training) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_found(training: Training, value: float) -> None:
    """One NaN step was saved, and retention then removed all healthy ones (pocket-tts #262)."""
    require_finite(training, training.run, 7, {"policy_loss": 0.5, "grad_norm": 1.0})
    training.rank.weight[999] = value
    with pytest.raises(NonFinite, match="step 7: not finite: policy rank 0: policy/parameters: w; nothing of"):
        require_finite(training, training.run, 7, {"policy_loss": 0.5})
    (record,) = [r for r in read_journal(training.run.directory) if isinstance(r.event, NonFiniteFound)]
    assert record.event == NonFiniteFound(step=7, names=["policy rank 0: policy/parameters: w"])


def test_losses_and_gradient_norms_must_be_finite_and_other_metrics_need_not(training: Training) -> None:
    require_finite(training, training.run, 7, {"reward/pass_at_2": float("nan")})
    with pytest.raises(NonFinite, match="not finite: critic/critic_loss is inf and 1 more") as caught:
        require_finite(training, training.run, 7, {"grad_norm": float("nan"), "critic/critic_loss": float("inf")})
    assert caught.value.exit_code == 25


def test_tensors_without_a_notion_of_infinity() -> None:
    whole = Entry("x/y", lambda owner: Captured({"n": torch.ones(3, dtype=torch.int64)}, {}), lambda *_: None)
    assert not_finite([whole], None) == []


def test_a_save_that_is_abandoned_is_waited_for(training: Training) -> None:
    training.step(save=True)
    assert training.saver.abandon() and training.saved[0] == 1


def test_a_save_that_failed_when_training_did_is_in_the_journal(training: Training) -> None:
    def refuse(staged: Staged) -> dict[str, Shard]:
        raise StoreError("no space")

    training.keepers = {"here": Here(SimpleNamespace(write=refuse))}
    training.step(save=True)
    assert training.saver.abandon()
    failed = [r.event for r in read_journal(training.run.directory) if isinstance(r.event, SaveFailed)]
    assert [(event.step, event.failures, event.reason) for event in failed] == [(1, 1, "no space")]


def test_a_save_that_does_not_end_keeps_this_process_from_going_on(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.saving.ABANDON_AFTER", 0.05)
    training.may_write.clear()
    training.step(save=True)
    assert not training.saver.abandon()
    training.run.journal.close()
    training.may_write.set()
    training.saver._behind.shutdown(wait=True)
    assert read_journal(training.run.directory) == [], "it may not write to a file of another attempt"


def test_state_that_changed_before_it_was_staged_is_never_let_go(training: Training) -> None:
    training.step(save=False)
    training.rank.weight.fill_(7.0)
    (shard,) = digest_entries([PARAMETERS], training.rank).values()
    training.rank.weight.fill_(8.0)
    training.saver.save(1, {"policy/parameters": ManifestEntry.of("policy/parameters", [shard])}, last=False)
    with pytest.raises(DivergenceError):
        training.saver.abandon()


def test_what_a_run_with_a_key_saves_is_signed(training: Training) -> None:
    training.run.signer = Signer(Ed25519PrivateKey.from_private_bytes(bytes(32)))
    training.step(save=True)
    training.saver.finish()
    found, _ = newest_restorable(training.run.tiers.primary.store)
    assert found and found[0].signature and found[0].signature.key == training.run.signer.public
