"""Between captured entries and what a checkpoint holds of them. The same code serves ranks and driver."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from checkpointing.blobs import Blob
from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import DivergenceError, MissingEntry
from checkpointing.manifest import Shard
from checkpointing.tensors import tensor_digest, unpack_tensors
from trainer.captured import Captured
from trainer.reshard import Read, reshard
from trainer.state import Entry

Fetched = dict[str, tuple[Captured, Shard]]
"""{entry: (what to restore, the digests of just that)}"""


def digest_shard(captured: Captured, rank: int) -> Shard:
    """What `captured` is, bit for bit, without writing it."""
    data = canonical_json(captured.data)
    digests = {name: tensor_digest(tensor) for name, tensor in captured.tensors.items()}
    return Shard(rank=rank, tensors=None, data=Blob(digest=digest(data), size=len(data)), tensor_digests=digests)


def digest_entries(entries: Iterable[Entry], owner: Any, rank: int = 0) -> dict[str, Shard]:
    return {entry.name: digest_shard(entry.capture(owner), rank) for entry in entries}


def not_finite(entries: Iterable[Entry], owner: Any) -> list[str]:
    """Tensors of this owner that hold a NaN or an infinity, as "entry: tensor"."""
    return [
        f"{entry.name}: {name}"
        for entry in entries
        for name, tensor in entry.capture(owner).tensors.items()
        if not bool(torch.isfinite(tensor).all())
    ]


def fetch_entry(
    entry: Entry, owner: Any, rank: int, world_size: int, shards: Sequence[Shard], read: Read, step: int
) -> tuple[Captured, Shard]:
    """What `rank` of `world_size` is to restore of one entry, given what all ranks that saved it hold.

    Raises:
        CorruptBlob: no tier has a blob of it whole.
    """
    if len(shards) == world_size:
        return _read_shard(shards[rank], read), shards[rank]
    assert entry.reshard is not None, "every entry of a rank says how it is resharded"
    captured = reshard(owner, entry.reshard, shards, read, step)
    return captured, digest_shard(captured, rank)


def fetch_entries(
    entries: Sequence[Entry],
    owner: Any,
    place: tuple[int, int],
    shards: dict[str, Sequence[Shard]],
    read: Read,
    step: int,
) -> Fetched:
    """`fetch_entry` for each of `entries`; one is read while another is verified. `place` is (rank, world size)."""
    rank, world_size = place

    def fetch(entry: Entry) -> tuple[Captured, Shard]:
        return fetch_entry(entry, owner, rank, world_size, shards[entry.name], read, step)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip([entry.name for entry in entries], pool.map(fetch, entries), strict=True))


def _read_shard(shard: Shard, read: Read) -> Captured:
    assert shard.data is not None  # every entry has JSON, be it `null`
    tensors = unpack_tensors(read(shard.tensors)) if shard.tensors else {}
    return Captured(tensors, json.loads(read(shard.data)))


def restore_entries(entries: Iterable[Entry], owner: Any, fetched: Fetched, rank: int = 0) -> dict[str, Shard]:
    """Restore this owner's entries in order, then capture them again: what is returned is what the owner now holds.

    Raises:
        MissingEntry: an entry of this owner was not fetched.
    """
    for entry in entries:
        if entry.name not in fetched:
            raise MissingEntry(f"{entry.name}: not in the checkpoint; it can't be resumed by this version")
        entry.restore(owner, fetched[entry.name][0])
    return digest_entries(entries, owner, rank)


def require_equal(saved: dict[str, Shard], held: dict[str, Shard]) -> None:
    """After a restore the owner must hold exactly what was saved.

    Raises:
        DivergenceError: names the first entry and tensor that differ.
    """
    for name, shard in held.items():
        expected = saved[name]
        for tensor in sorted(expected.tensor_digests.keys() | shard.tensor_digests.keys()):
            want, got = expected.tensor_digests.get(tensor), shard.tensor_digests.get(tensor)
            if want != got:
                raise DivergenceError(
                    f"{name}: rank {shard.rank} does not hold what was saved: {tensor} is {got}, checkpoint has {want}"
                )
        if expected.data != shard.data:
            raise DivergenceError(f"{name}: rank {shard.rank} does not hold what was saved (its JSON part differs)")
