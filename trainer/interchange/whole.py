"""A checkpoint's tensors in full, from its Store alone: no ranks, no Ray, no GPU."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checkpointing.blobs import get_blob
from checkpointing.disk import explained, fsync_dir, make_folder
from checkpointing.errors import CheckpointError, MissingEntry
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.store import Store
from checkpointing.tensors import unpack_tensors
from trainer.captured import Captured
from trainer.reshard import Box, assemble


def find_entry(manifest: Manifest, entry: str) -> Entry:
    """Raises MissingEntry."""
    if entry not in manifest.entries:
        raise MissingEntry(f"{entry}: not in the checkpoint of step {manifest.step}")
    return manifest.entries[entry]


def read_shards(store: Store, entry: Entry) -> list[Captured]:
    """What each rank captured of `entry`, verified."""
    return [Captured(_tensors(store, shard), _data(store, shard)) for shard in entry.shards]


def _tensors(store: Store, shard: Shard) -> dict[str, torch.Tensor]:
    return unpack_tensors(get_blob(store, shard.tensors)) if shard.tensors else {}


def _data(store: Store, shard: Shard) -> Any:
    return json.loads(get_blob(store, shard.data)) if shard.data else None


def read_whole(store: Store, manifest: Manifest, entry: str) -> dict[str, torch.Tensor]:
    """{name: full tensor} of an entry that is one thing over all ranks, such as parameters and optimizer.

    Raises:
        MissingEntry: the checkpoint has no such entry.
        CheckpointError: each rank has its own (RNG streams), or the shards don't add up; names the tensor.
        CorruptBlob: a blob is missing or damaged.
    """
    return gather(entry, read_shards(store, find_entry(manifest, entry)))


def gather(entry: str, saved: list[Captured]) -> dict[str, torch.Tensor]:
    """`saved` is what every rank captured of `entry`. Raises CheckpointError."""
    whole = {}
    if not is_sharded(saved):
        raise CheckpointError(f"{entry}: each rank has its own; there is nothing to gather")
    for name, placed in saved[0].data["shards"].items():
        shape = tuple(placed["shape"])
        pieces = [(rank.data["shards"][name]["offset"], rank.tensors[name]) for rank in saved]
        whole[name] = assemble(f"{entry}: {name}", pieces, Box((0,) * len(shape), shape))
    return whole


def is_sharded(saved: list[Captured]) -> bool:
    """Whether the ranks hold pieces of one whole."""
    return isinstance(saved[0].data, dict) and "shards" in saved[0].data


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, to write into; durable and renamed to `out` at the end, gone if an error ends it.

    Raises:
        CheckpointError: `out` exists.
        StoreError: storage refused.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists; choose another folder, nothing is overwritten")
    with explained(f"write {out}"):
        make_folder(out.parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".tmp-{out.name}-", dir=out.parent))
        try:
            hidden.chmod(0o755)  # mkdtemp lets nobody else read it
            yield hidden
            for path in [hidden, *hidden.rglob("*")]:
                fsync_dir(path) if path.is_dir() else _fsync_file(path)
            hidden.rename(out)
            fsync_dir(out.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _fsync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
