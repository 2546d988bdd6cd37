"""Blobs: write-once bytes named by their own digest. A name that does not match its content is corruption."""

from collections.abc import Buffer
from typing import Annotated

from pydantic import Field

from checkpointing.canonical import digest
from checkpointing.errors import CorruptBlob
from checkpointing.records import Digest, Strict
from checkpointing.store import Store
from checkpointing.tiers import copies


class Blob(Strict):
    """Which bytes: their digest and their number."""

    digest: Digest
    size: Annotated[int, Field(ge=0)]

    @classmethod
    def of(cls, data: Buffer) -> "Blob":
        return cls(digest=digest(data), size=memoryview(data).nbytes)

    @property
    def key(self) -> str:
        return f"blobs/{self.digest[:2]}/{self.digest}"


def put_blob(store: Store, data: Buffer) -> Blob:
    """Store `data` under its digest. A store that already keeps exactly these bytes writes nothing."""
    blob = Blob.of(data)
    store.put(blob.key, data)
    return blob


def get_blob(store: Store, blob: Blob) -> bytes:
    """The bytes of `blob`, verified; from another tier where one has lost or damaged them.

    Raises:
        CorruptBlob: no tier has them right; names the key, and what is wrong with it where.
    """
    return get_verified(store, blob.key, blob)


def get_verified(store: Store, key: str, expected: Blob) -> bytes:
    """The bytes under `key`, which must be `expected`. Raises CorruptBlob."""
    complaints = []
    for copy in copies(store, key):
        complaint = _complaint(copy.data, expected)
        if complaint is None:
            return copy.data
        complaints.append(f"{complaint} ({copy.tier})" if copy.tier else complaint)
    if complaints:
        raise CorruptBlob(f"{key} is damaged: {'; '.join(complaints)}")
    raise CorruptBlob(f"{key} is missing")


def _complaint(data: Buffer, expected: Blob) -> str | None:
    size = memoryview(data).nbytes
    if size != expected.size:
        return f"{size} bytes, {expected.size} expected"
    found = digest(data)
    return None if found == expected.digest else f"its {size} bytes have digest {found}"


def require_present(store: Store, blob: Blob) -> None:
    """Check presence and size without reading the bytes. Raises CorruptBlob."""
    sizes = [item.size for item in store.list(blob.key) if item.key == blob.key]
    if blob.size not in sizes:
        found = f"{sizes[0]} bytes, {blob.size} expected" if sizes else "missing"
        raise CorruptBlob(f"{blob.key} is damaged: {found}")
