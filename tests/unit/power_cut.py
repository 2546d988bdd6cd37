"""What a file system still has after a power cut: only what was fsynced, names and contents each for themselves.

`Disk(folder)` watches `os.fsync` below a real folder. The fsync of a file makes its content durable, the fsync of a
folder the names in it; nothing else does. `lose_the_rest(to)` rebuilds in another folder what would be left: a name
whose file was never fsynced leads to an empty one, as on a real disk (the zero-byte files that a rename without fsync
leaves behind).
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._held: list[int] = []
        self._real = os.fsync

    @contextmanager
    def watched(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "fsync", self._fsync)
            yield
        for fd in self._held:
            os.close(fd)

    def _fsync(self, fd: int) -> None:
        """Not passed on: thousands of syncs would take minutes, and it is this model that forgets."""
        inode = os.fstat(fd).st_ino
        if inode not in self._contents and inode not in self._names:
            self._held.append(os.dup(fd))  # so that no later file is given the same number
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            self._names[inode] = {entry.name: entry.inode() for entry in os.scandir(fd)}
        else:
            with open(f"/proc/self/fd/{fd}", "rb") as file:  # noqa: PTH123  its name may be gone
                self._contents[inode] = file.read()

    def lose_the_rest(self, to: Path) -> None:
        folders = {self._root.stat().st_ino} | self._folders()
        self._rebuild(self._root.stat().st_ino, to, folders)

    def _folders(self) -> set[int]:
        return {path.stat().st_ino for path in self._root.rglob("*") if path.is_dir()}

    def _rebuild(self, inode: int, to: Path, folders: set[int]) -> None:
        to.mkdir(parents=True, exist_ok=True)
        for name, child in self._names.get(inode, {}).items():
            if child in folders:
                self._rebuild(child, to / name, folders)
            else:
                (to / name).write_bytes(self._contents.get(child, b""))
