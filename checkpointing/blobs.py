"""Blobs: write-once bytes named by their own digest. A name that does not match its content is corruption."""

from collections.abc import Buffer
from typing import Annotated

from pydantic import Field

from checkpointing.canonical import digest
from checkpointing.errors import CorruptBlob
from checkpointing.records import Digest, Strict
from checkpointing.store import KeyMissing, Store


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
    """The bytes of `blob`, verified.

    Raises:
        CorruptBlob: they are missing, or do not match; names the key.
    """
    return get_verified(store, blob.key, blob)


def get_verified(store: Store, key: str, expected: Blob) -> bytes:
    """The bytes under `key`, which must be `expected`. Raises CorruptBlob."""
    try:
        data = store.get(key)
    except KeyMissing as error:
        raise CorruptBlob(f"{key} is missing: {error}") from error
    if len(data) != expected.size:
        raise CorruptBlob(f"{key} is damaged: {len(data)} bytes, {expected.size} expected")
    if digest(data) != expected.digest:
        raise CorruptBlob(f"{key} is damaged: its {len(data)} bytes have digest {digest(data)}")
    return data


def require_present(store: Store, blob: Blob) -> None:
    """Check presence and size without reading the bytes. Raises CorruptBlob."""
    sizes = [item.size for item in store.list(blob.key) if item.key == blob.key]
    if sizes != [blob.size]:
        found = f"{sizes[0]} bytes, {blob.size} expected" if sizes else "missing"
        raise CorruptBlob(f"{blob.key} is damaged: {found}")
