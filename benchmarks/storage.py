"""What it costs to make a checkpoint exist on a file system, and to get it back."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.processes import ENTRIES, Keeper, Process, Rank
from benchmarks.profile import Profile
from benchmarks.report import Figure, alternate
from checkpointing.blobs import get_blob
from checkpointing.disk import write_all
from checkpointing.manifest import Manifest, Shard
from checkpointing.tiers import Tiers
from trainer.shards import Fetched, fetch_entries, require_equal, restore_entries

_CACHED = 0.01
"""How much of a file may be in the page cache when it counts as dropped."""


def commit(profile: Profile) -> Iterator[Figure]:
    with profile.ranks() as ranks, profile.folder("commit") as folder, Process(Keeper, str(folder / "store")) as keeper:
        steps = iter(range(1, 1000))

        def ours() -> float:
            staged = ranks.stage(next(steps))
            start = time.perf_counter()
            manifest: Manifest = keeper.call(Keeper.save, staged)
            seconds = time.perf_counter() - start
            keeper.call(Keeper.drop, list(manifest.blobs()))
            return seconds

        def theirs() -> float:
            start = time.perf_counter()
            ranks.call(_write_plain, folder)
            seconds = time.perf_counter() - start
            for written in folder.glob("plain-*"):
                written.unlink()
            return seconds

        ours(), theirs()
        figures = alternate(profile.repetitions, ours, theirs)
    yield Figure("commit", "commit on posix / sequential write and fsync", 1.25, *figures)


def _write_plain(rank: Rank, folder: Path) -> None:
    assert rank.staged is not None and rank.buffer.memory is not None
    fd = os.open(folder / f"plain-{rank.rank}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with memoryview(rank.buffer.memory) as whole, whole[: rank.staged.nbytes] as staged:
            write_all(fd, staged)
        os.fsync(fd)
    finally:
        os.close(fd)


def restore(profile: Profile) -> Iterator[Figure]:
    with profile.ranks() as ranks, profile.folder("restore") as folder:
        with Process(Keeper, str(folder)) as keeper:
            manifest: Manifest = keeper.call(Keeper.save, ranks.stage(1))
        ranks.call(_forget_staged)
        shards = {name: entry.shards for name, entry in manifest.entries.items()}
        files = [folder / blob.key for blob in manifest.blobs()]

        def ours(action: Any) -> float:
            _drop_cache(files)
            return ranks.seconds(action, str(folder), shards)

        def theirs() -> float:
            _drop_cache(files)
            return ranks.seconds(_read_plain, str(folder), shards)

        whole = alternate(profile.repetitions, lambda: ours(_restore), theirs)
        fetched = alternate(profile.repetitions, lambda: ours(_fetch), theirs)
    yield Figure("restore", "restore with verification / plain read, nothing cached", 1.3, *whole)
    yield Figure("restore", "of that, until what is on disk is verified / plain read", None, *fetched)


def _forget_staged(rank: Rank) -> None:
    """A process that restores has staged nothing yet."""
    rank.buffer.close()


def _fetched(rank: Rank, url: str, shards: dict[str, Sequence[Shard]]) -> Fetched:
    read = partial(get_blob, Tiers.open([url]))
    world_size = len(shards[ENTRIES[0].name])
    return fetch_entries(ENTRIES, rank.worker, (rank.rank, world_size), shards, read, 1)


def _fetch(rank: Rank, url: str, shards: dict[str, Sequence[Shard]]) -> float:
    return rank.together(lambda: _fetched(rank, url, shards))


def _restore(rank: Rank, url: str, shards: dict[str, Sequence[Shard]]) -> float:
    """As a rank does (trainer/workers.py): fetch and verify, restore, digest what is held now, compare."""

    def whole() -> None:
        fetched = _fetched(rank, url, shards)
        held = restore_entries(ENTRIES, rank.worker, fetched, rank.rank)
        require_equal({name: shard for name, (_, shard) in fetched.items()}, held)

    return rank.together(whole)


def _read_plain(rank: Rank, folder: str, shards: dict[str, Sequence[Shard]]) -> float:
    own = [part[rank.rank] for part in shards.values()]
    paths = [Path(folder) / blob.key for shard in own for blob in (shard.tensors, shard.data) if blob]
    return rank.together(lambda: [path.read_bytes() for path in paths])


def _drop_cache(files: Sequence[Path]) -> None:
    """Have the kernel forget `files`, and see that it has."""
    for file in files:
        fd = os.open(file, os.O_RDWR)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            cached = _cached(fd)
        finally:
            os.close(fd)
        if cached > _CACHED:
            raise RuntimeError(f"{cached:.0%} of {file} is still in the page cache: nothing here can be measured")


def _cached(fd: int) -> float:
    """Which part of a file is in the page cache, if it has more than a page."""
    size = os.fstat(fd).st_size
    if size <= mmap.PAGESIZE:
        return 0.0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with mmap.mmap(fd, size) as memory:
        start = ctypes.c_char.from_buffer(memory)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) / len(pages)
