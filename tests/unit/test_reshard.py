"""Elastic restore: boxes of any split reassembled bit for bit, and real FSDP2 ranks 3 -> 2 -> 1 -> 3."""

import math
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from checkpointing.blobs import get_blob
from checkpointing.errors import CheckpointError
from checkpointing.manifest import Shard
from checkpointing.store import open_store
from trainer import rank_state
from trainer.captured import Captured
from trainer.interchange.write import put_shard
from trainer.reshard import (
    Box,
    Rule,
    assemble,
    boxes,
    by_placement,
    derived_rng,
    needed,
    reshard,
    same_on_every_rank,
)
from trainer.shards import digest_entries, digest_shard
from trainer.state import Entry

ENTRIES = [
    Entry("policy/parameters", rank_state.capture_parameters, rank_state.restore_parameters),
    Entry("policy/optimizer", rank_state.capture_optimizer, rank_state.restore_optimizer),
    Entry("policy/lr_scheduler", rank_state.capture_scheduler, rank_state.restore_scheduler),
]
RULES: dict[str, Rule] = {
    "policy/parameters": by_placement,
    "policy/optimizer": by_placement,
    "policy/lr_scheduler": same_on_every_rank,
}


def _chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """(offset, length) by torch.chunk's rule, which FSDP follows: the last ones may be short or empty."""
    step = max(math.ceil(size / parts), 1)
    return [(min(i * step, size), max(min(step, size - i * step), 0)) for i in range(parts)]


def _split(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A grid of `parts` pieces along each dimension."""
    grid = product(*(_chunks(size, n) for size, n in zip(shape, parts, strict=True)))
    return [Box(tuple(o for o, _ in cell), tuple(n for _, n in cell)) for cell in grid]


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@st.composite
def _case(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    saved, wanted = (_split(shape, tuple(draw(st.integers(1, 6)) for _ in shape)) for _ in range(2))
    dtype = draw(st.sampled_from([torch.int32, torch.bfloat16, torch.float32, torch.uint8]))
    bits = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64).mul(37).to(torch.uint8)
    return bits.view(dtype).reshape(shape), saved, wanted


@settings(deadline=None)
@given(_case())
def test_any_split_reassembles_into_any_other(case: tuple[torch.Tensor, list[Box], list[Box]]) -> None:
    whole, saved, wanted = case
    placements = [{"shape": list(whole.shape), "offset": list(box.offset)} for box in saved]
    assert boxes(placements) == saved  # sizes follow from offsets
    for box in wanted:
        read = needed(placements, box) or {0}
        part = assemble("t", [(saved[rank].offset, _cut(whole, saved[rank])) for rank in sorted(read)], box)
        expected = _cut(whole, box)
        assert part.shape == box.shape
        assert part.dtype == whole.dtype
        assert part.contiguous().reshape(-1).view(torch.uint8).tolist() == (
            expected.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
        for rank in read if len(read) > 1 else ():
            rest = [(saved[other].offset, _cut(whole, saved[other])) for other in sorted(read - {rank})]
            with pytest.raises(CheckpointError, match=r"lost: .*cover"):
                assemble("lost", rest, box)


def test_replicas_count_once_and_contradictions_are_errors() -> None:
    whole = torch.arange(6.0)
    box = Box((0,), (6,))
    halves = [([0], whole[:3]), ([3], whole[3:])]
    assert assemble("t", [*halves, *halves], box).equal(whole)
    assert needed([{"shape": [6], "offset": [o]} for o in (0, 3, 0, 3)], box) == {0, 1}
    with pytest.raises(CheckpointError, match="same elements"):
        assemble("t", [([0], whole[:4]), ([2], whole[2:4])], box)  # as many elements as the whole, and two are missing
    with pytest.raises(CheckpointError, match="dtypes"):
        assemble("t", [([0], whole[:3]), ([3], whole[3:].double())], box)
    scalar = torch.tensor(2.0)
    assert assemble("step", [([], scalar), ([], scalar)], Box((), ())).equal(scalar)


def test_what_must_be_the_same_on_every_rank_is_compared() -> None:
    one, other = Captured({}, {"last_epoch": 2}), Captured({}, {"last_epoch": 3})
    assert same_on_every_rank(None, [one, one]) is one
    with pytest.raises(CheckpointError, match="same on every rank"):
        same_on_every_rank(None, [one, other])


def test_derived_streams_are_a_function_of_seed_step_role_and_rank() -> None:
    def derive(seed: int = 1, step: int = 2, role: str = "policy", rank: int = 3) -> Shard:
        worker = SimpleNamespace(cfg=SimpleNamespace(seed=seed), role=role, _rank=rank)
        return digest_shard(derived_rng(worker, [], step), 0)

    before = digest_shard(rank_state.capture_rng(None), 0)
    streams = [derive(), derive(seed=2), derive(step=3), derive(role="critic"), derive(rank=0)]
    assert derive() == streams[0]
    assert len({shard.model_dump_json() for shard in streams}) == len(streams)
    assert digest_shard(rank_state.capture_rng(None), 0) == before


class Rank:
    """What the capture functions need of a SkyRL worker, sharded over the ranks of `mesh`, some with empty shards."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(3, 1)
        )
        self.model[0].weight.requires_grad_(False)
        for layer in (self.model[0], self.model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def train(self, steps: int) -> None:
        for step in range(steps):
            inputs = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def gathered(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers, moments and step counts in full; every rank of the mesh must call it."""
        named: dict[str, torch.Tensor] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                named[f"{key}/{name}"] = value
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named.items()}


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return digest_shard(Captured(tensors, None), 0).tensor_digests


def _saved_by(rank: Rank, folder: Path, group: Any) -> list[dict[str, Shard]]:
    store = open_store(str(folder))
    mine = {entry.name: put_shard(store, entry.capture(rank), dist.get_rank(group)) for entry in ENTRIES}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return everyone


def _restore(rank: Rank, saved: list[dict[str, Shard]], folder: Path) -> None:
    store = open_store(str(folder))
    for entry in ENTRIES:
        shards = [of_rank[entry.name] for of_rank in saved]
        captured = reshard(rank, RULES[entry.name], shards, lambda blob: get_blob(store, blob), 2)
        entry.restore(rank, captured)
        assert digest_shard(entry.capture(rank), 0) == digest_shard(captured, 0)


def _rank_main(me: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=me, world_size=3)
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (3, 2, 1)}  # collective: groups of all sizes
    first = Rank(meshes[3], seed=0)
    first.train(2)
    saved = original = _saved_by(first, folder, meshes[3].get_group())
    state = _bits(first.gathered())
    assert {"0.weight", "exp_avg/3.bias", "exp_avg_sq/2.weight", "step/0.bias", "1.running_mean"} <= state.keys()
    held = rank_state.capture_parameters(first).tensors["3.bias"].numel()
    assert held == (1 if me == 0 else 0), "the other ranks must hold empty shards"
    first.train(1)
    after = first.gathered()
    for size in (2, 1, 3):
        if me < size:
            other = Rank(meshes[size], seed=0)  # the frozen base is the same, everything else is not yet trained
            assert _bits(other.gathered()) != state
            _restore(other, saved, folder)
            assert _bits(other.gathered()) == state
            saved = _saved_by(other, folder, meshes[size].get_group())
            other.train(1)
            for (
                name,
                tensor,
            ) in other.gathered().items():  # not bit for bit: another world size adds up in another order
                torch.testing.assert_close(tensor, after[name], rtol=1e-5, atol=1e-6)
        handed_on = [saved]
        dist.broadcast_object_list(handed_on, src=0)
        saved = handed_on[0]
    assert saved == original, "there and back again, shard for shard"
    dist.barrier()
    dist.destroy_process_group()


def test_three_ranks_restore_on_two_one_and_three_again(tmp_path: Path) -> None:
    spawn(_rank_main, (tmp_path,), nprocs=3)  # type: ignore[no-untyped-call]


def test_a_shard_without_a_tensor_that_others_have_is_an_error(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 2)
    worker = SimpleNamespace(model=layer)
    whole = rank_state.capture_parameters(worker)
    assert by_placement(worker, [whole]).tensors["weight"].equal(layer.weight)
    short = Captured({"bias": whole.tensors["bias"]}, {"shards": {"bias": whole.data["shards"]["bias"]}})
    with pytest.raises(CheckpointError, match="weight"):
        by_placement(worker, [whole, short])
    grown = {"shards": whole.data["shards"] | {"weight": {"shape": [3, 4], "offset": [0, 0]}}}
    with pytest.raises(CheckpointError, match=r"weight.*global shape"):
        by_placement(worker, [whole, Captured(whole.tensors, grown)])
    assert digest_entries(ENTRIES[:1], worker)["policy/parameters"] == digest_shard(by_placement(worker, [whole]), 0)
