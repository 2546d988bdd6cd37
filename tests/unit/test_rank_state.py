"""Capture and restore of one rank's parameters, moments, scheduler and RNG streams, on a small real model and AdamW."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.blobs import get_blob, put_blob
from checkpointing.canonical import canonical_json
from checkpointing.errors import CheckpointError, CorruptBlob, DivergenceError, MissingEntry
from checkpointing.manifest import Shard
from checkpointing.staging import StagingBuffer, write_staged
from checkpointing.store import Store
from checkpointing.tensors import pack_tensors, unpack_tensors
from trainer import rank_state
from trainer.captured import Captured
from trainer.shards import digest_entries, fetch_entry, require_equal, restore_entries
from trainer.staging import stage_entries
from trainer.state import entries_of

POLICY_ONLY: Any = SimpleNamespace(
    critic=SimpleNamespace(model=SimpleNamespace(path=None)),
    algorithm=SimpleNamespace(use_kl_loss=False, use_kl_in_reward=False),
    update_ref_every_epoch=False,
)
ENTRIES = entries_of("policy", POLICY_ONLY)


def write_entries(entries: Any, owner: Any, store: Store, rank: int = 0) -> dict[str, Shard]:
    return write_staged(stage_entries(entries, owner, StagingBuffer(), rank, step=1), [store])


def read_entries(entries: Any, owner: Any, store: Store, shards: dict[str, Shard]) -> dict[str, Shard]:
    read = partial(get_blob, store)
    named = {entry.name: entry for entry in entries}
    fetched = {n: fetch_entry(named[n], owner, 0, 1, [shards[n]], read, 1) for n in named if n in shards}
    return restore_entries(entries, owner, fetched, next(iter(shards.values())).rank)


class Rank:
    """What the capture functions need of a SkyRL worker: a model with a frozen base and dropout, AdamW, a schedule."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.model[0].weight.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(16, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_a_fresh_rank_continues_bit_for_bit(store: Store) -> None:
    rank = Rank()
    rank.train(3)
    saved = write_entries(ENTRIES, rank, store)
    unbroken = rank.train(2), digest_entries(ENTRIES, rank)
    other = Rank()  # the frozen base is the same, everything else has gone astray
    other.train(1)
    held = read_entries(ENTRIES, other, store, saved)
    require_equal(saved, held)
    assert (other.train(2), digest_entries(ENTRIES, other)) == unbroken


@pytest.mark.parametrize("left_out", [entry.name for entry in ENTRIES])
def test_an_entry_left_out_of_the_restore_is_named(store: Store, left_out: str) -> None:
    rank = Rank()
    rank.train(3)
    saved = write_entries(ENTRIES, rank, store)
    fresh = Rank(seed=1)
    read_entries([entry for entry in ENTRIES if entry.name != left_out], fresh, store, saved)
    with pytest.raises(DivergenceError, match=left_out):
        require_equal(saved, digest_entries(ENTRIES, fresh))


@pytest.mark.parametrize("missing", [entry.name for entry in ENTRIES])
def test_an_entry_missing_from_the_checkpoint_is_an_error(store: Store, missing: str) -> None:
    rank = Rank()
    saved = write_entries(ENTRIES, rank, store)
    del saved[missing]
    with pytest.raises(MissingEntry, match=missing):
        read_entries(ENTRIES, Rank(), store, saved)


def test_frozen_parameters_are_not_copied_and_buffers_are() -> None:
    names = rank_state.capture_parameters(Rank()).tensors.keys()
    assert "0.weight" not in names
    assert {"0.bias", "2.running_mean"} <= names
    assert "0.weight" in rank_state.capture_all_parameters(Rank()).tensors


def test_a_lost_moment_is_an_error_and_a_scaled_one_shows_after_two_steps() -> None:
    rank = Rank()
    rank.train(3)
    captured = rank_state.capture_optimizer(rank)
    assert {"exp_avg/0.bias", "exp_avg_sq/0.bias", "step/0.bias"} <= captured.tensors.keys()
    stray = Captured(captured.tensors | {"exp_avg/nobody": torch.zeros(1)}, captured.data)
    with pytest.raises(MissingEntry, match="nobody"):
        rank_state.restore_optimizer(Rank(), stray)
    scaled = {name: t * 2 if name.startswith("exp_avg_sq") else t for name, t in captured.tensors.items()}
    digests = []
    for moments in (captured.tensors, captured.tensors, scaled):
        other = Rank()
        for entry in ENTRIES:
            changed = Captured(moments, captured.data) if entry.name == "policy/optimizer" else entry.capture(rank)
            entry.restore(other, changed)
        other.train(2)
        digests.append(digest_entries(ENTRIES, other)["policy/parameters"])
    assert digests[0] == digests[1] != digests[2]


def test_a_parameter_too_many_or_of_another_shape_is_an_error() -> None:
    rank = Rank()
    captured = rank_state.capture_parameters(rank)
    extra = Captured(captured.tensors | {"extra": torch.zeros(1)}, captured.data)
    with pytest.raises(MissingEntry, match="extra"):
        rank_state.restore_parameters(rank, extra)
    reshaped = Captured(captured.tensors | {"0.bias": torch.zeros(3)}, captured.data)
    with pytest.raises(CheckpointError, match=r"0\.bias"):
        rank_state.restore_parameters(rank, reshaped)


def test_the_schedule_has_one_owner_and_resuming_twice_changes_nothing() -> None:
    rank = Rank()
    rank.train(10)
    rate = rank.optimizer.param_groups[0]["lr"]
    for _ in range(2):
        other = Rank(seed=1)
        for entry in ENTRIES:
            entry.restore(other, entry.capture(rank))
        assert other.scheduler.last_epoch == 10
        assert other.optimizer.param_groups[0]["lr"] == other.scheduler.get_last_lr()[0] == rate
        rank = other


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.standard_normal()), torch.rand(()).item()]


def test_every_rank_gets_its_own_stream_back(store: Store) -> None:
    entry = next(entry for entry in ENTRIES if entry.name == "policy/rng")
    saved, expected = [], []
    for rank in range(4):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        np.random.standard_normal()  # leaves a cached second value, which is part of the state
        saved.append(write_entries([entry], None, store, rank))
        expected.append([_draw() for _ in range(5)])
    for rank in (2, 0, 3, 1):
        read_entries([entry], None, store, saved[rank])
        assert [_draw() for _ in range(5)] == expected[rank]
    assert len({str(draws) for draws in expected}) == 4


def test_rng_is_json_and_plain_tensors_and_damage_to_it_is_fatal(store: Store) -> None:
    captured = rank_state.capture_rng(None)
    canonical_json(captured.data)
    assert unpack_tensors(pack_tensors(captured.tensors)).keys() == captured.tensors.keys()
    put_blob(store, canonical_json(captured.data))
    blob = put_blob(store, pack_tensors(captured.tensors))
    store.put(blob.key, get_blob(store, blob)[:-1] + b"\x01")
    entry = next(entry for entry in ENTRIES if entry.name == "policy/rng")
    shard = digest_entries([entry], None)["policy/rng"].model_copy(update={"tensors": blob})
    with pytest.raises(CorruptBlob, match=blob.digest):
        read_entries([entry], None, store, {"policy/rng": shard})
