"""From captured entries to the blobs and digests of a checkpoint, and back. The same code serves ranks and driver."""

import json
from collections.abc import Iterable
from typing import Any

from checkpointing.blobs import Blob, get_blob, put_blob
from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import DivergenceError, MissingEntry
from checkpointing.manifest import Shard
from checkpointing.phases import reached
from checkpointing.store import Store
from checkpointing.tensors import pack_tensors, tensor_digest, unpack_tensors
from trainer.captured import Captured
from trainer.state import Entry


def digest_shard(captured: Captured, rank: int) -> Shard:
    """What `captured` is, bit for bit, without writing it."""
    data = canonical_json(captured.data)
    digests = {name: tensor_digest(tensor) for name, tensor in captured.tensors.items()}
    return Shard(rank=rank, tensors=None, data=Blob(digest=digest(data), size=len(data)), tensor_digests=digests)


def digest_entries(entries: Iterable[Entry], owner: Any, rank: int = 0) -> dict[str, Shard]:
    return {entry.name: digest_shard(entry.capture(owner), rank) for entry in entries}


def write_entries(entries: Iterable[Entry], owner: Any, store: Store, rank: int = 0) -> dict[str, Shard]:
    """Capture and store this owner's entries as blobs. Nothing refers to them until the driver commits."""
    shards = {}
    for entry in entries:
        captured = entry.capture(owner)
        shard = digest_shard(captured, rank)
        put_blob(store, canonical_json(captured.data))
        if captured.tensors:
            shard = shard.model_copy(update={"tensors": put_blob(store, pack_tensors(captured.tensors))})
        shards[entry.name] = shard
        reached("save.shard_written", role=entry.owner, rank=rank, entry=entry.name)
    return shards


def read_entries(entries: Iterable[Entry], owner: Any, store: Store, shards: dict[str, Shard]) -> dict[str, Shard]:
    """Restore this owner's entries in order, then capture them again: what is returned is what the owner now holds.

    Raises:
        MissingEntry: the checkpoint lacks an entry of this owner.
        CorruptBlob: a blob does not match its name.
    """
    rank = 0
    for entry in entries:
        if entry.name not in shards:
            raise MissingEntry(f"{entry.name}: not in the checkpoint; it can't be resumed by this version")
        shard = shards[entry.name]
        rank = shard.rank
        tensors = unpack_tensors(get_blob(store, shard.tensors)) if shard.tensors else {}
        assert shard.data is not None  # every entry has JSON, be it `null`
        entry.restore(owner, Captured(tensors, json.loads(get_blob(store, shard.data))))
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
