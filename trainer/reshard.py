"""Elastic restore: a checkpoint of N ranks becomes the state of one of M ranks, bit for bit.

Each saved shard says where its tensors lie in the whole (`data["shards"]`, see `rank_state`), and where this rank's lie
is asked of the live model. So no rule of how FSDP splits is repeated here: any grid of boxes restores on any other.

A rule takes (worker, what the saved ranks captured, step) and returns what this rank would have captured:
`by_placement` for parameters and optimizer, `same_on_every_rank` for the LR scheduler, `derived_rng` for the streams.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from checkpointing.blobs import Blob
from checkpointing.canonical import canonical_json
from checkpointing.errors import CheckpointError
from checkpointing.manifest import Shard
from checkpointing.tensors import unpack_tensors
from trainer import rank_state
from trainer.captured import Captured
from trainer.determinism import seed_streams

Rule = Callable[[Any, Sequence[Captured], int], Captured]

Read = Callable[[Blob], bytes]
"""Verified bytes of a blob."""

Placement = dict[str, list[int]]
"""{"shape": global shape, "offset": of one rank's piece}, in elements."""


class Box(NamedTuple):
    """A rectangular piece of a tensor, in elements of the whole."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def overlap(a: Box, b: Box) -> Box | None:
    """What `a` and `b` have in common; None if that is nothing. A scalar overlaps with itself."""
    start = tuple(map(max, a.offset, b.offset))
    shape = tuple(
        min(x + m, y + n) - begin for x, m, y, n, begin in zip(a.offset, a.shape, b.offset, b.shape, start, strict=True)
    )
    return Box(start, shape) if all(size > 0 for size in shape) else None


def _within(region: Box, outer: Box) -> tuple[slice, ...]:
    """Index of `region` in a tensor that holds `outer`."""
    return tuple(slice(r - o, r - o + n) for r, o, n in zip(region.offset, outer.offset, region.shape, strict=True))


def assemble(name: str, pieces: Sequence[tuple[Sequence[int], torch.Tensor]], box: Box) -> torch.Tensor:
    """The part `box` of a tensor, of shape `box.shape`, on the CPU.

    Args:
        name: of the tensor, for errors.
        pieces: (offset, tensor) of each saved piece that may overlap the box; replicas count once.
        box: which part of the whole is wanted; may be empty.

    Raises:
        CheckpointError: the pieces leave an element of the box out, or are of different dtypes.
    """
    distinct = {Box(tuple(offset), tuple(piece.shape)): piece for offset, piece in reversed(pieces)}
    if len(dtypes := {piece.dtype for piece in distinct.values()}) != 1:
        raise CheckpointError(f"{name}: its shards are of {len(dtypes)} dtypes, exactly one expected: {dtypes}")
    whole = torch.empty(box.shape, dtype=dtypes.pop())
    filled: list[Box] = []
    for held, piece in distinct.items():
        if region := overlap(held, box):
            if any(overlap(region, other) for other in filled):
                raise CheckpointError(f"{name}: two shards hold the same elements, near {list(region.offset)}")
            whole[_within(region, box)].copy_(piece[_within(region, held)])
            filled.append(region)
    if sum(torch.Size(region.shape).numel() for region in filled) != whole.numel():
        raise CheckpointError(
            f"{name}: the shards of the checkpoint don't cover elements {list(box.offset)} "
            f"to {[o + n for o, n in zip(box.offset, box.shape, strict=True)]} of it"
        )
    return whole


def boxes(placements: Sequence[Placement]) -> list[Box]:
    """What each saved rank holds of one tensor: its piece ends where the next piece begins, in every dimension."""
    edges = [
        sorted({*(placed["offset"][dim] for placed in placements), size})
        for dim, size in enumerate(placements[0]["shape"])
    ]
    return [
        Box(
            tuple(placed["offset"]),
            tuple(
                next((edge for edge in edges[dim] if edge > start), start) - start
                for dim, start in enumerate(placed["offset"])
            ),
        )
        for placed in placements
    ]


def needed(placements: Sequence[Placement], box: Box) -> set[int]:
    """The saved ranks whose pieces make up `box`; of replicas the first."""
    first = {held: rank for rank, held in reversed(list(enumerate(boxes(placements))))}
    return {rank for held, rank in first.items() if overlap(held, box)}


def _wanted(worker: Any) -> Callable[[str, Sequence[int]], Box]:
    """(tensor name, its global shape) -> what this rank holds of it. A moment lies where its parameter lies."""
    live = rank_state.capture_all_parameters(worker)

    def box(name: str, shape: Sequence[int]) -> Box:
        parameter = name if name in live.tensors else name.partition("/")[2]
        placed = live.data["shards"].get(parameter)
        if placed and placed["shape"] == list(shape):
            return Box(tuple(placed["offset"]), tuple(live.tensors[parameter].shape))
        return Box((0,) * len(shape), tuple(shape))  # the same on every rank: a step count

    return box


def ranks_needed(worker: Any, data: Sequence[Any]) -> list[int]:
    """The saved ranks whose tensors this rank must read for an entry, given the JSON part of all of them, by rank.

    Rank 0 is always one of them: it knows the dtype of what this rank holds nothing of.
    """
    if not isinstance(data[0], dict) or "shards" not in data[0]:
        return [0]
    wanted, ranks = _wanted(worker), {0}
    for name, placed in data[0]["shards"].items():
        ranks |= needed([_placed(name, part) for part in data], wanted(name, placed["shape"]))
    return sorted(ranks)


def _placed(name: str, data: Any) -> Placement:
    try:
        placed: Placement = data["shards"][name]
    except KeyError:
        raise CheckpointError(f"{name}: in some shards of the checkpoint and not in others") from None
    return placed


def by_placement(worker: Any, saved: Sequence[Captured], step: int = 0) -> Captured:
    """Parameters or optimizer as this rank of the live model holds them, from the ranks of `ranks_needed`, in order.

    Raises:
        CheckpointError: the shards don't add up to what this rank holds, or contradict each other; names the tensor.
    """
    wanted = _wanted(worker)
    tensors, shards = {}, {}
    for name, placed in saved[0].data["shards"].items():
        shape = placed["shape"]
        if any(_placed(name, part.data)["shape"] != shape for part in saved):
            raise CheckpointError(f"{name}: its shards disagree about its global shape")
        box = wanted(name, shape)
        tensors[name] = assemble(
            name, [(part.data["shards"][name]["offset"], part.tensors[name]) for part in saved], box
        )
        shards[name] = {"shape": shape, "offset": list(box.offset)}
    rest = same_on_every_rank(worker, [Captured({}, _without_shards(part.data)) for part in saved], step)
    return Captured(tensors, rest.data | {"shards": shards})


def _without_shards(data: Any) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "shards"}


def same_on_every_rank(worker: Any, saved: Sequence[Captured], step: int = 0) -> Captured:
    """What all ranks hold alike (LR schedule, hyperparameters): rank 0's.

    Raises:
        CheckpointError: the ranks given do not hold the same.
    """
    if len({canonical_json(part.data) for part in saved}) != 1:
        raise CheckpointError("what must be the same on every rank differs between the shards of the checkpoint")
    return saved[0]


def derived_rng(worker: Any, saved: Sequence[Captured], step: int) -> Captured:
    """Fresh streams for this rank: what the saved ranks had drawn says nothing about ranks that were not there.

    A function of (run seed, step, role, rank), see docs/determinism.md. The live streams are left as they were.
    """
    key = f"{worker.cfg.seed}/topology/{step}/{worker.role}/{worker._rank}"
    live = rank_state.capture_rng(worker)
    try:
        seed_streams(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
        return rank_state.capture_rng(worker)
    finally:
        rank_state.restore_rng(worker, live)


def reshard(worker: Any, rule: Rule, shards: Sequence[Shard], read: Read, step: int) -> Captured:
    """What this rank is to restore of one entry, from the shards of all saved ranks; reads only the ones it needs.

    For parameters and optimizer, capturing again after the restore gives the same digests as the result.
    """
    data = [json.loads(read(shard.data)) if shard.data else None for shard in shards]
    saved = []
    for rank in ranks_needed(worker, data):
        blob = shards[rank].tensors
        saved.append(Captured(unpack_tensors(read(blob)) if blob else {}, data[rank]))
    return rule(worker, saved, step)
