"""Captured state as the blobs and the manifest of a checkpoint, at once and without a trainer."""

from collections.abc import Mapping, Sequence

from checkpointing.blobs import put_blob
from checkpointing.canonical import canonical_json
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.store import Store
from checkpointing.tensors import pack_tensors
from trainer.captured import Captured
from trainer.shards import digest_shard


def put_shard(store: Store, captured: Captured, rank: int) -> Shard:
    """Store what one rank captured of an entry as blobs."""
    shard = digest_shard(captured, rank)
    put_blob(store, canonical_json(captured.data))
    if not captured.tensors:
        return shard
    return shard.model_copy(update={"tensors": put_blob(store, pack_tensors(captured.tensors))})


def write_manifest(
    store: Store, step: int, entries: Mapping[str, Sequence[Captured]], topology: dict[str, int], run: dict[str, str]
) -> Manifest:
    """Store all blobs of a checkpoint. It comes to exist when the caller commits the manifest.

    Args:
        store: where the run keeps its checkpoints.
        step: GRPO steps completed.
        entries: {entry name: what each rank captured, in rank order}.
        topology: {role: world size} of every role of the run, also of those without entries.
        run: {what must not change within the run: digest}.
    """
    written = {
        name: Entry.of(name, [put_shard(store, captured, rank) for rank, captured in enumerate(ranks)])
        for name, ranks in entries.items()
    }
    return Manifest(step=step, topology=topology, entries=written, run=run)
