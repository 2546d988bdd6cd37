"""Host buffers that the State is copied into while training stands still, laid out as the files they become.

A `StagingBuffer` is anonymous shared memory: another process of the same user on the same node opens it by `path`, and
the kernel takes it back when the last process that has it open is gone, however that happened. It is kept from one
save to the next, because touching fresh memory costs several times what the copy does.

What is staged for an entry is the image of its safetensors file, so writing a blob needs no second copy.
"""

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3

from checkpointing.blobs import Blob
from checkpointing.canonical import canonical_json
from checkpointing.errors import FormatError, StoreError
from checkpointing.manifest import Shard
from checkpointing.phases import reached
from checkpointing.store import Store

_ALIGN = 4096

SAFETENSORS_DTYPES = {
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""{torch's name: (safetensors' name, bytes an element)}, in the order in which safetensors lays tensors out."""

_ORDER = {name: place for place, name in enumerate(SAFETENSORS_DTYPES)}


class Spec(NamedTuple):
    dtype: str
    """torch's name, "bfloat16"."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = SAFETENSORS_DTYPES[self.dtype][1]
        for size in self.shape:
            count *= size
        return count


class Image(NamedTuple):
    """A safetensors file that is about to be: its first bytes, its size, and where each tensor's bytes lie in it."""

    header: bytes
    nbytes: int
    offsets: dict[str, int]


def image_of(specs: Mapping[str, Spec]) -> Image:
    """The layout that the safetensors library itself chooses: by dtype, widest first, then by name.

    Raises:
        FormatError: a dtype that the format has no name for.
    """
    for name, spec in specs.items():
        if spec.dtype not in SAFETENSORS_DTYPES:
            raise FormatError(f"{name}: tensors of {spec.dtype} have no place in the format (docs/format.md)")
    order = sorted(specs, key=lambda name: (_ORDER[specs[name].dtype], name))
    fields, offsets, end = {}, {}, 0
    for name in order:
        spec, start = specs[name], end
        end += spec.nbytes
        kind = SAFETENSORS_DTYPES[spec.dtype][0]
        fields[name] = {"dtype": kind, "shape": list(spec.shape), "data_offsets": [start, end]}
        offsets[name] = start
    body = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    body += b" " * (-len(body) % 8)
    header = len(body).to_bytes(8, "little") + body
    return Image(header, len(header) + end, {name: len(header) + start for name, start in offsets.items()})


class StagedShard(NamedTuple):
    """One entry of one rank as it lies in a buffer: the image of its file is `nbytes` from `offset` on, 0 if it has no
    tensors."""

    entry: str
    offset: int
    nbytes: int
    tensors: dict[str, tuple[int, Spec]]
    """{name: (offset in the buffer, what it is)}"""
    data: bytes
    """Canonical JSON."""


class Staged(NamedTuple):
    """What one rank has staged for one step."""

    role: str
    rank: int
    step: int
    path: str
    nbytes: int
    shards: list[StagedShard]


class StagingBuffer:
    """One rank's buffer. `memory` is None until `reserve`."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("staged-state")
        self.memory: mmap.mmap | None = None

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def reserve(self, nbytes: int) -> mmap.mmap:
        """The buffer, at least `nbytes` long and with every page present. Nothing that views it may be alive."""
        if self.memory is None or len(self.memory) < nbytes:
            if self.memory is not None:
                self.memory.close()
            size = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
            os.ftruncate(self._fd, size)
            self.memory = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self.memory

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
        os.close(self._fd)


class Mapped:
    """Another process's buffer, read-only. Use as a context manager.

    Raises:
        StoreError: the process that staged it is gone.
    """

    def __init__(self, staged: Staged) -> None:
        self._staged = staged

    def __enter__(self) -> memoryview:
        where = f"{self._staged.role} rank {self._staged.rank}"
        try:
            with open(self._staged.path, "rb") as file:  # noqa: PTH123  a descriptor of another process
                self._memory = mmap.mmap(file.fileno(), max(self._staged.nbytes, 1), prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise StoreError(f"step {self._staged.step}: what {where} staged is gone with it: {error}") from error
        self._view = memoryview(self._memory)
        return self._view

    def __exit__(self, *_: object) -> None:
        self._view.release()
        with suppress(BufferError):  # the traceback of what went wrong may hold a view: then it is closed after that
            self._memory.close()


def write_staged(staged: Staged, stores: Sequence[Store]) -> dict[str, Shard]:
    """Store everything that was staged, as blobs, in each of `stores`. {entry: what it is}.

    Hashing needs the processor and writing the disk, so both go on at once. What names a file is hashed before what
    only the manifest needs, since writing has to wait for it.

    Raises:
        StoreError: storage refused, or the process that staged it is gone.
    """
    shards = staged.shards
    with Mapped(staged) as memory, ThreadPoolExecutor(1) as ahead:
        blobs = ahead.map(lambda shard: _blob(shard, memory), shards)
        digests = ahead.map(lambda shard: _tensor_digests(shard, memory), shards)
        stored = []
        for shard, tensors in zip(shards, blobs, strict=True):
            data = Blob.of(shard.data)
            with memory[shard.offset : shard.offset + shard.nbytes] as image:
                for store in stores:
                    store.put(data.key, shard.data)
                    if tensors is not None:
                        store.put(tensors.key, image)
            stored.append((tensors, data))
            reached("save.shard_written", role=staged.role, rank=staged.rank, step=staged.step, entry=shard.entry)
        return {
            shard.entry: Shard(rank=staged.rank, tensors=tensors, data=data, tensor_digests=found)
            for shard, (tensors, data), found in zip(shards, stored, digests, strict=True)
        }


def _blob(shard: StagedShard, memory: memoryview) -> Blob | None:
    with memory[shard.offset : shard.offset + shard.nbytes] as image:
        return Blob.of(image) if shard.nbytes else None


def _tensor_digests(shard: StagedShard, memory: memoryview) -> dict[str, str]:
    digests = {}
    for name, (offset, spec) in shard.tensors.items():
        with memory[offset : offset + spec.nbytes] as raw:
            digests[name] = blake3(canonical_json([spec.dtype, list(spec.shape)])).update(raw).hexdigest()
    return digests
