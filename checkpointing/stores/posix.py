"""A folder as a store: a key is a file below it. For FSx for Lustre and any other file system with hard links.

A file gets its name only when its bytes are on disk: temporary file in the same folder, fsync, rename (or link, to
create once), fsync of the folder. A writer that is killed leaves at most a hidden temporary file, which no verb sees.
"""

import os
import secrets
import time
from collections.abc import Buffer, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from checkpointing.disk import explained, fsync_dir, make_folder, write_all
from checkpointing.errors import AlreadyExists, ConfigError, KeyMissing
from checkpointing.phases import reached
from checkpointing.store import Item, Promises, Store, check_key, is_part

TEMP_PREFIX = ".tmp-"
"""Begins with a dot, as no part of a key does."""

ABANDONED_AFTER = 24 * 3600
"""Seconds until a temporary file is taken for a dead writer's. A live writer that loses one fails, corrupts nothing."""

_CHUNK = 1 << 20

_STRIDE = 8 << 20
"""Bytes after which the disk is asked to begin."""


def from_url(url: str) -> Store:
    path = url.removeprefix("file://")
    if not path or (path != url and not path.startswith("/")):
        raise ConfigError(f"store {url!r}: give an absolute path, as in file:///data/run1, or a plain path")
    return PosixStore(Path(path).absolute())


class PosixStore:
    promises = Promises(atomic_put=True, durable_on_return=True, create_once=True)

    def __init__(self, root: Path) -> None:
        self._root = root
        self._durable: set[Path] = set()

    def put(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        with explained(f"write {path}"):
            self._make_folder(path.parent)
            if not _holds(path, data):
                with _written(path, data) as temp:
                    reached("store.put_written", key=key)
                    temp.replace(path)
                    reached("store.put_renamed", key=key)
            fsync_dir(path.parent)

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with explained(f"read {path}"):
            try:
                return path.read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise KeyMissing(f"{path} does not exist") from None

    def list(self, prefix: str) -> Sequence[Item]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        with explained(f"list {self._root / prefix}"):
            return sorted(item for item in self._walk(prefix.rpartition("/")[0]) if item.key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with explained(f"delete {path}"):
            try:
                path.unlink()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return
            fsync_dir(path.parent)

    def create(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        with explained(f"create {path}"):
            self._make_folder(path.parent)
            with _written(path, data) as temp:
                reached("store.create_written", key=key)
                try:
                    path.hardlink_to(temp)
                except FileExistsError:
                    exists = True
                else:
                    exists = False
                    reached("store.create_linked", key=key)
                temp.unlink()
            # Also when it exists: its creator may have been killed before this, and our caller will now build on it.
            fsync_dir(path.parent)
        if exists:
            raise AlreadyExists(f"{path} exists, and may be created only once")

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _walk(self, folder: str) -> Iterator[Item]:
        try:
            entries = list(os.scandir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if not is_part(entry.name):
                continue
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(key)
            elif entry.is_file(follow_symlinks=False):
                try:
                    yield Item(key, entry.stat(follow_symlinks=False).st_size)
                except FileNotFoundError:
                    continue  # deleted since the folder was read

    def _make_folder(self, folder: Path) -> None:
        """Make `folder` and its name durable, and clear it of abandoned temporary files.

        Done once per process for each folder of the store, found or made: a process that was killed may have made it
        without its name having reached the disk.
        """
        if folder in self._durable:
            return
        if folder == self._root:
            make_folder(folder)
        else:
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            fsync_dir(folder.parent)
        for temp in folder.glob(f"{TEMP_PREFIX}*"):
            with suppress(FileNotFoundError):  # its writer is alive, and has just finished
                if temp.stat().st_mtime < time.time() - ABANDONED_AFTER:
                    temp.unlink()
        self._durable.add(folder)


@contextmanager
def _written(path: Path, data: Buffer) -> Iterator[Path]:
    """A temporary file next to `path` with `data` on disk; removed again if storage refuses, there or in the body."""
    temp = path.with_name(f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_behind(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        yield temp
    except OSError:
        temp.unlink(missing_ok=True)
        raise


def _write_behind(fd: int, data: Buffer) -> None:
    """Write every byte, with the disk at work meanwhile instead of only once fsync asks for everything at once."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _STRIDE):
        write_all(fd, view[start : start + _STRIDE])
        # Linux begins to write the range, and drops what is on disk already: of what was just written, nothing.
        os.posix_fadvise(fd, start, _STRIDE, os.POSIX_FADV_DONTNEED)


def _holds(path: Path, data: Buffer) -> bool:
    """Whether `path` already has exactly these bytes, on disk.

    Name and size are no proof: a resumed run computes the very blob again that made it fall back, and would commit the
    damaged one. Comparing is still several times cheaper than writing.
    """
    view = memoryview(data).cast("B")
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != len(view):
                return False
            for start in range(0, len(view), _CHUNK):
                # As bytes: two memoryviews compare element by element, bytes by memcmp.
                if file.read(_CHUNK) != bytes(view[start : start + _CHUNK]):
                    return False
            os.fsync(file.fileno())
            return True
    except OSError:
        return False  # absent or unreadable: either way it has to be written
