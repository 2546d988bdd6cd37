"""What product code takes for the module `os`: files of the virtual disk, and processes of the world."""

import errno
import os
from collections.abc import Callable
from typing import Any

from .disk import Disk, Entry, File, Folder, Stat, refusal


class System:
    """`process()` says who asks."""

    O_WRONLY, O_CREAT, O_EXCL, O_TRUNC, O_APPEND = os.O_WRONLY, os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND
    O_RDONLY, O_DIRECTORY, POSIX_FADV_DONTNEED = os.O_RDONLY, os.O_DIRECTORY, os.POSIX_FADV_DONTNEED

    def __init__(self, disk: Disk, process: Callable[[], Any]) -> None:
        self._disk, self._process = disk, process

    @property
    def environ(self) -> dict[str, str]:
        env: dict[str, str] = self._process().env
        return env

    def getpid(self) -> int:
        pid: int = self._process().pid
        return pid

    def getppid(self) -> int:
        parent = self._process().parent
        return 1 if parent is None or parent.code is not None else int(parent.pid)

    def nice(self, increment: int) -> None:
        pass

    def posix_fadvise(self, *_: int) -> None:
        pass

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        name = str(path)
        node = self._disk.find(name)
        if node is None:
            if not flags & os.O_CREAT:
                raise refusal(errno.ENOENT, name)
            self._disk.change("create", name)
            folder, last = self._disk.folder_of(name)
            node = folder.names.setdefault(last, File(self._disk.time()))
        elif flags & os.O_EXCL:
            raise refusal(errno.EEXIST, name)
        elif isinstance(node, File) and flags & os.O_TRUNC:
            node.data = bytearray()
        return self._disk.open(node, name)

    def close(self, fd: int) -> None:
        self._disk.open_files.pop(fd, None)

    def write(self, fd: int, data: Any) -> int:
        file, path = self._open(fd)
        view = bytes(data)
        self._disk.change("write", path)
        file.data += view
        return len(view)

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        file, _ = self._open(fd)
        file.data[at : at + len(data)] = data
        return len(data)

    def ftruncate(self, fd: int, size: int) -> None:
        file, _ = self._open(fd)
        if len(file.data) > size:
            del file.data[size:]

    def fstat(self, fd: int) -> Stat:
        return Stat(len(self._open(fd)[0].data), 0.0)

    def fsync(self, fd: int) -> None:
        node, path = self._at(fd)
        self._disk.change("fsync", path)
        if isinstance(node, Folder):
            node.durable = dict(node.names)
        else:
            node.durable = bytes(node.data)

    def scandir(self, path: Any) -> list[Entry]:
        self._disk.looked(str(path))
        node = self._disk.need(str(path))
        if not isinstance(node, Folder):
            raise refusal(errno.ENOTDIR, str(path))
        return [Entry(name, node.names[name]) for name in sorted(node.names)]

    def _at(self, fd: int) -> tuple[File | Folder, str]:
        if fd not in self._disk.open_files:  # its process is dead, or the power was gone
            raise refusal(errno.EBADF, str(fd))
        return self._disk.open_files[fd]

    def _open(self, fd: int) -> tuple[File, str]:
        node, path = self._at(fd)
        assert isinstance(node, File)
        return node, path
