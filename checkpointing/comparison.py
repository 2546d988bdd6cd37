"""How two checkpoints differ: which entries, which tensors and by how much. What has equal digests is not read."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from checkpointing.blobs import Blob, get_blob
from checkpointing.canonical import canonical_json
from checkpointing.manifest import Entry, Manifest
from checkpointing.records import Strict
from checkpointing.tiers import Tiers

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 22
"""Elements compared at once: they are widened to float64 for it."""

ABSENT = object()


class TensorDifference(Strict):
    """A tensor of one rank, A before B.

    dtypes, shapes     of both; None where it is absent
    differing          elements whose bits differ; None if dtype or shape do, and then there is no more to say
    max_abs            largest |B - A|, in float64; NaN or infinite if an element is
    relative_l2        |B - A| / |A|, over all elements; infinite if A is zero
    """

    rank: int
    name: str
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    elements: int
    differing: int | None = None
    max_abs: float | None = None
    relative_l2: float | None = None


class EntryDifference(Strict):
    """An entry whose state differs.

    ranks    (in A, in B); 0 where the entry is absent. If they are not equal, nothing below is compared
    data     paths into the JSON part that differ, "rank 0: epoch"
    tensors  those that differ
    equal    how many tensors do not
    """

    name: str
    ranks: tuple[int, int]
    data: tuple[str, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    equal: int = 0


class Difference(Strict):
    """`equal`: names of the entries that are bit-identical."""

    steps: tuple[int, int]
    equal: tuple[str, ...]
    entries: tuple[EntryDifference, ...]


class Side:
    """One of the two checkpoints, and where its bytes are."""

    def __init__(self, tiers: Tiers, manifest: Manifest) -> None:
        self.tiers, self.manifest = tiers, manifest

    def json(self, blob: Blob | None) -> Any:
        return None if blob is None else from_json(get_blob(self.tiers, blob))

    def tensors(self, blob: Blob | None) -> "dict[str, torch.Tensor]":
        from checkpointing.tensors import unpack_tensors

        return {} if blob is None else unpack_tensors(get_blob(self.tiers, blob))


def compare(a: Side, b: Side) -> Difference:
    """How `b` differs from `a`. Holds one shard of each in memory.

    Raises:
        CorruptBlob: no tier has what has to be read.
        FormatError: what should be tensors is no safetensors file.
        StoreError: storage refused.
    """
    entries_a, entries_b = a.manifest.entries, b.manifest.entries
    names = sorted(entries_a.keys() | entries_b.keys())
    equal = [name for name in names if _digest(entries_a.get(name)) == _digest(entries_b.get(name))]
    return Difference(
        steps=(a.manifest.step, b.manifest.step),
        equal=tuple(equal),
        entries=tuple(_entry(name, a, b) for name in names if name not in equal),
    )


def _digest(entry: Entry | None) -> str | None:
    return entry.digest if entry else None


def _entry(name: str, a: Side, b: Side) -> EntryDifference:
    shards_a, shards_b = (
        side.manifest.entries[name].shards if name in side.manifest.entries else () for side in (a, b)
    )
    ranks = (len(shards_a), len(shards_b))
    if ranks[0] != ranks[1]:
        return EntryDifference(name=name, ranks=ranks)
    data: list[str] = []
    tensors: list[TensorDifference] = []
    equal = 0
    for mine, theirs in zip(shards_a, shards_b, strict=True):
        if mine.data != theirs.data:
            paths = _paths(a.json(mine.data), b.json(theirs.data))
            data += [f"rank {mine.rank}: {path}" for path in paths]
        different = sorted(
            name
            for name in mine.tensor_digests.keys() | theirs.tensor_digests.keys()
            if mine.tensor_digests.get(name) != theirs.tensor_digests.get(name)
        )
        equal += len(mine.tensor_digests.keys() | theirs.tensor_digests.keys()) - len(different)
        if different:
            tensors += _tensors(different, a.tensors(mine.tensors), b.tensors(theirs.tensors), mine.rank)
    return EntryDifference(name=name, ranks=ranks, data=tuple(data), tensors=tuple(tensors), equal=equal)


def _paths(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two JSON values differ, "a.b"; "" for the whole. Lists are compared as a whole."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _paths(a.get(key, ABSENT), b.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif ABSENT in (a, b) or canonical_json(a) != canonical_json(b):
        yield path or "(all of it)"


def _tensors(
    names: list[str], a: "dict[str, torch.Tensor]", b: "dict[str, torch.Tensor]", rank: int
) -> Iterator[TensorDifference]:
    for name in names:
        mine, theirs = a.get(name), b.get(name)
        found = TensorDifference(
            rank=rank,
            name=name,
            dtypes=(_dtype(mine), _dtype(theirs)),
            shapes=(_shape(mine), _shape(theirs)),
            elements=max(0 if tensor is None else tensor.numel() for tensor in (mine, theirs)),
        )
        if (
            mine is not None
            and theirs is not None
            and found.dtypes[0] == found.dtypes[1]
            and mine.shape == theirs.shape
        ):
            differing, max_abs, relative = _measure(mine, theirs)
            found = found.model_copy(update={"differing": differing, "max_abs": max_abs, "relative_l2": relative})
        yield found


def _measure(a: "torch.Tensor", b: "torch.Tensor") -> tuple[int, float, float]:
    """(elements whose bits differ, largest |B - A|, |B - A| / |A|) of two tensors of one shape and dtype."""
    import torch

    differing, squares, of_a = 0, 0.0, 0.0
    largest: list[float] = []
    for x, y in zip(*(torch.split(tensor.reshape(-1), CHUNK) for tensor in (a, b)), strict=True):
        size = x.element_size()
        unequal = (x.view(torch.uint8).reshape(-1, size) != y.view(torch.uint8).reshape(-1, size)).any(1)
        wide_x, wide_y = x.double(), y.double()
        # Equal bits are no difference, infinities and NaNs included.
        delta = torch.where(unequal, wide_y - wide_x, 0.0).abs()
        largest.append(float(delta.max()))
        differing += int(unequal.sum())
        squares += float(delta.square().sum())
        of_a += float(wide_x.square().sum())
    relative = math.sqrt(squares / of_a) if of_a else squares and math.sqrt(squares) * math.inf  # a NaN stays one
    return differing, float(torch.tensor(largest, dtype=torch.float64).max()), relative


def _dtype(tensor: "torch.Tensor | None") -> str | None:
    return None if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: "torch.Tensor | None") -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
