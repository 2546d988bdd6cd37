"""Store: bytes by key in five verbs, and what a backend promises about them.

Everything that is kept goes through these verbs, so a tier, a cache or a retry is one more Store around a Store. Adding
a backend is one file in `checkpointing/stores/` and one line in `BACKENDS`.
"""

import importlib
import re
from collections.abc import Buffer, Sequence
from typing import NamedTuple, Protocol

from checkpointing.errors import AlreadyExists, ConfigError, FormatError, KeyMissing

__all__ = [
    "BACKENDS",
    "AlreadyExists",
    "Item",
    "KeyMissing",
    "Promises",
    "Store",
    "check_key",
    "is_key",
    "is_part",
    "open_store",
]

BACKENDS = {
    "file": "checkpointing.stores.posix",
    "fsspec": "checkpointing.stores.fsspec_store",
    "memory": "checkpointing.stores.memory",
    "s3": "checkpointing.stores.s3",
}
"""{URL scheme: module with `from_url(url: str) -> Store`}; imported on use, as clients of object stores are heavy."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_KEY = re.compile(rf"{_PART.pattern}(/{_PART.pattern})*")


class Item(NamedTuple):
    key: str
    size: int
    """Bytes."""


class Promises(NamedTuple):
    atomic_put: bool
    """A reader sees the old bytes or the new ones, also when the writer dies half-way."""
    durable_on_return: bool
    """What a verb did survives a power cut from the moment it returns."""
    create_once: bool
    """Of any number of creators of one key exactly one succeeds."""


class Store(Protocol):
    """Keys are relative paths (see `check_key`); no key may be a folder of another.

    Every verb raises FormatError for a key that is none, and StoreError where storage refuses; then nothing
    half-written is visible under the key.
    """

    @property
    def promises(self) -> Promises: ...

    def put(self, key: str, data: Buffer) -> None:
        """Store `data` under `key`, replacing what is there. May write nothing where exactly `data` is already kept."""

    def get(self, key: str) -> bytes:
        """The bytes under `key`; KeyMissing if there are none."""

    def list(self, prefix: str) -> Sequence[Item]:
        """Every item whose key starts with `prefix`, in order of key. Never answered from a cache. "" lists all."""

    def delete(self, key: str) -> None:
        """Remove `key`; nothing happens if it is not there."""

    def create(self, key: str, data: Buffer) -> None:
        """Store `data` under `key`, which must be new.

        Raises AlreadyExists, and then the key's bytes are as durable as if this call had written them. A backend whose
        answer was lost on the way may say so about its own success: records carry a nonce to tell (`commit.py`).
        """


def is_part(name: str) -> bool:
    """Whether `name` may stand between two slashes of a key."""
    return _PART.fullmatch(name) is not None


def is_key(name: str) -> bool:
    """Whether `check_key` would return it."""
    return _KEY.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return `key` if it is one: parts of `A-Z a-z 0-9 _ . -` joined by "/", each of 1 to 255 characters and not
    beginning with "." or "-".

    So a key can't be absolute, climb out of the store by "..", hold a wildcard, or collide with a backend's own hidden
    files.

    Raises:
        FormatError: it is not a key.
    """
    if not is_key(key):
        raise FormatError(f"{key!r} is not a key: it must be a relative path of letters, digits, '_', '.' and '-'")
    return key


def open_store(url: str, bandwidth: int | None = None, kms_key: str | None = None) -> Store:
    """The store at `file:///abs/path`, a plain path, `memory://name`, `s3://bucket/prefix`, or `fsspec+protocol://...`
    for any protocol that fsspec knows. Nothing is written yet.

    What follows `file://` or `s3://bucket/` is the path as it stands, `%`, `#` and `?` included. For s3 only:
    `bandwidth` bounds uploads to so many bytes per second; `kms_key` is the key of AWS KMS, by id or ARN, with which
    the server is to encrypt what is stored.

    Raises:
        ConfigError: unknown scheme, or no usable path.
    """
    scheme, separator, _ = url.partition("://")
    scheme = scheme.partition("+")[0] if separator else "file"
    if scheme not in BACKENDS:
        raise ConfigError(f"store {url!r}: unknown scheme {scheme!r}; use one of {', '.join(sorted(BACKENDS))}")
    options = {"bandwidth": bandwidth, "kms_key": kms_key}
    given = {name: value for name, value in options.items() if value is not None}
    if given and scheme != "s3":
        raise ConfigError(f"store {url!r}: {' and '.join(given)} are for s3:// alone")
    backend = importlib.import_module(BACKENDS[scheme])
    store: Store = backend.from_url(url, **given)
    return store
