"""Whatever fsspec can reach as a store: `fsspec+PROTOCOL://...`. For storage without a backend of its own.

A value gets its name when all its bytes have arrived. No more is promised of a protocol than fsspec promises; only what
creates a key once and keeps it through a power cut can be a tier (`tiers.py`).
"""

import secrets
import threading
from collections.abc import Buffer, Callable, Sequence
from typing import Any

import fsspec

from checkpointing.errors import AlreadyExists, ConfigError, KeyMissing, StoreError
from checkpointing.store import Item, Promises, Store, check_key, is_key

_S3, _LOCAL, _MEMORY = {"s3", "s3a"}, {"file", "local"}, {"memory"}

_memory_lock = threading.Lock()
"""fsspec's memory is one for the whole process, and looks whether a key exists before it writes."""


def from_url(url: str) -> Store:
    url = url.removeprefix("fsspec+")
    protocol, separator, path = url.partition("://")
    if not separator or not path.strip("/"):
        raise ConfigError(f"store 'fsspec+{url}': give protocol and path, as in fsspec+gs://bucket/run1")
    # Shared instances and cached listings answer with what was there before.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol in _LOCAL:
        options["auto_mkdir"] = True
    try:
        return FsspecStore(fsspec.filesystem(protocol, **options), url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"store 'fsspec+{url}': fsspec can't use {protocol!r}: {error}") from error


class FsspecStore:
    def __init__(self, filesystem: fsspec.AbstractFileSystem, url: str) -> None:
        """`url` is fsspec's, without `fsspec+`."""
        self._fs = filesystem
        self._url = url.rstrip("/")
        self._root: str = filesystem._strip_protocol(self._url)
        self._protocol = url.partition("://")[0]
        can_create = self._protocol in _S3 | _LOCAL | _MEMORY
        self.promises = Promises(atomic_put=True, durable_on_return=self._protocol in _S3, create_once=can_create)

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)
        self._verb("write", key, lambda path: self._write(path, bytes(data)))

    def get(self, key: str) -> bytes:
        check_key(key)
        data: bytes = self._verb("read", key, self._fs.cat_file)
        return data

    def list(self, prefix: str) -> Sequence[Item]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        folder = prefix.rpartition("/")[0]
        try:
            found = self._verb("list", folder, lambda path: self._fs.find(path, detail=True))
        except KeyMissing:
            return []
        start = len(self._root) + 1
        items = (Item(path[start:], entry["size"]) for path, entry in found.items())
        return sorted(item for item in items if item.key.startswith(prefix) and is_key(item.key))

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._verb("delete", key, self._fs.rm_file)
        except KeyMissing:
            return

    def create(self, key: str, data: Buffer) -> None:
        check_key(key)
        if not self.promises.create_once:
            raise ConfigError(f"{self._url}: fsspec can't create a key at most once there")
        self._verb("create", key, lambda path: self._create(path, bytes(data)))

    def _create(self, path: str, data: bytes) -> None:
        if self._protocol in _S3:
            self._fs.pipe_file(path, data, mode="create")
        elif self._protocol in _MEMORY:
            with _memory_lock:
                self._fs.pipe_file(path, data, mode="create")
        else:
            self._write_local(path, data, self._fs.link)

    def _write(self, path: str, data: bytes) -> None:
        if self._protocol in _LOCAL:
            self._write_local(path, data, self._fs.mv)
            return
        if self._protocol in _S3 | _MEMORY:
            self._fs.pipe_file(path, data)
            return
        file = self._fs.open(path, "wb", autocommit=False)
        try:
            file.write(data)
            file.close()
        except BaseException:
            file.discard()
            raise
        file.commit()

    def _write_local(self, path: str, data: bytes, name: Callable[[str, str], None]) -> None:
        """fsspec's own commit moves from another folder, maybe of another device: readers would see half of it."""
        temp = f"{path.rpartition('/')[0]}/.tmp-{secrets.token_hex(8)}"
        try:
            self._fs.pipe_file(temp, data)
            name(temp, path)
        finally:
            if self._fs.exists(temp):
                self._fs.rm_file(temp)

    def _verb[T](self, doing: str, key: str, do: Callable[[str], T]) -> T:
        """Protocols raise what they like: what is not known to mean something is a refusal."""
        where = f"{self._url}/{key}"
        self._fs.invalidate_cache()
        try:
            return do(f"{self._root}/{key}" if key else self._root)
        except FileExistsError:
            raise AlreadyExists(f"{where} exists, and may be created only once") from None
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise KeyMissing(f"{where} does not exist") from None
        except Exception as error:
            if _failed_condition(error):
                raise AlreadyExists(f"{where} exists, and may be created only once") from None
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(f"cannot {doing} {where}: {reason}; check that storage and your access to it") from error


def _failed_condition(error: Exception) -> bool:
    """Whether S3 answered PreconditionFailed, which s3fs passes on as an OSError like any other."""
    answer = getattr(error.__cause__, "response", {})
    return isinstance(answer, dict) and answer.get("Error", {}).get("Code") == "PreconditionFailed"
