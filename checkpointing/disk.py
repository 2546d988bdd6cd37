"""What a POSIX file system needs before bytes are safe. Shared by the posix store and the journal."""

import errno
import os
from collections.abc import Buffer, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.errors import StoreError

_ADVICE = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space or have the quota raised",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "the file system is mounted read-only: remount it or choose another place",
    errno.EACCES: "give this user read and write permission there",
    errno.EPERM: "give this user read and write permission there",
}


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an OSError into a StoreError that says what failed, where, and what to do. `doing`: "write /a/b"."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "check that file system")
        raise StoreError(f"cannot {doing}: {error.strerror}; {advice}. What was stored before is untouched") from error


def write_all(fd: int, data: Buffer) -> None:
    """Write every byte; one `os.write` may take fewer than it was given (2 GiB at most on Linux)."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(fd, left) :]


def fsync_dir(directory: Path) -> None:
    """Make the names in `directory` durable: the fsync of a file does not cover the entry that leads to it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Make `folder`, and make every name on the way to it durable, whichever process made it."""
    folder.mkdir(parents=True, exist_ok=True)
    for parent in folder.parents:
        try:
            fsync_dir(parent)
        except PermissionError:
            return  # not ours to read, so not ours to have made either
