"""A disk that forgets: what was not fsynced may be gone after a power cut, contents and names each for themselves.

`Path` is a real path of which every access goes to the disk of the world. Every change is a point in time at which its
process may die, and takes a moment.
"""

import errno
import os
import pathlib
import random
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple, Self

RUN = "/run"
STORE = f"{RUN}/store"
"""Where the run is on this disk."""

SECONDS = 0.0005
"""That an operation takes."""


class File:
    """`durable`: what is left after a power cut, None if that is nothing but an empty file."""

    def __init__(self, time: float) -> None:
        self.data, self.durable, self.time = bytearray(), b"", time


class Folder:
    def __init__(self) -> None:
        self.names: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}


class Disk:
    """`point(name, seconds)` is called before each change, `changed(path)` after each that can be seen under a name,
    `looked(path)` when a folder is listed; `time()` is the wall clock's."""

    def __init__(
        self,
        point: Callable[[str, float], None],
        changed: Callable[[str], None],
        looked: Callable[[str], None],
        time: Callable[[], float],
    ) -> None:
        self.root = Folder()
        self.point, self.changed, self.looked, self.time = point, changed, looked, time
        self.refuses: int | None = None
        """The errno of whatever needs room, while the disk is full."""
        self.open_files: dict[int, tuple[File | Folder, str]] = {}
        self._next = 100

    def find(self, path: str) -> File | Folder | None:
        here: File | Folder | None = self.root
        for part in path.split("/"):
            if part:
                if type(here) is not Folder:
                    return None
                here = here.names.get(part)
        return here

    def need(self, path: str) -> File | Folder:
        found = self.find(path)
        if found is None:
            raise refusal(errno.ENOENT, path)
        return found

    def folder_of(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        found = self.need(above)
        if not isinstance(found, Folder):
            raise refusal(errno.ENOTDIR, above)
        return found, name

    def is_durable(self, path: str) -> bool:
        """Whether this name, and what is under it, would survive a power cut."""
        here: File | Folder = self.root
        for part in path.split("/")[1:]:
            if (
                not isinstance(here, Folder)
                or part not in here.durable
                or here.durable[part] is not here.names.get(part)
            ):
                return False
            here = here.durable[part]
        return isinstance(here, Folder) or here.durable == here.data

    def files(self, path: str) -> dict[str, bytes]:
        """{path below `path`: content}, without hidden files."""
        found: dict[str, bytes] = {}
        node = self.find(path)
        for name, child in node.names.items() if isinstance(node, Folder) else ():
            if isinstance(child, File):
                if not name.startswith("."):
                    found[name] = bytes(child.data)
            else:
                found |= {f"{name}/{key}": data for key, data in self.files(f"{path}/{name}").items()}
        return found

    def open(self, node: File | Folder, path: str) -> int:
        self._next += 1
        self.open_files[self._next] = (node, path)
        return self._next

    def change(self, what: str, path: str) -> None:
        self.point(f"disk.{what}", SECONDS)
        if self.refuses is not None and what in ("create", "write", "mkdir", "fsync"):
            raise refusal(self.refuses, path)

    def lose_power(self, rng: random.Random) -> None:
        """What was not synced is there or not, each as chance has it. Nobody has anything open any more."""
        self.open_files.clear()
        self._lose(self.root, rng)

    def _lose(self, folder: Folder, rng: random.Random) -> None:
        for name in sorted(folder.names.keys() | folder.durable.keys()):
            new, old = folder.names.get(name), folder.durable.get(name)
            left = new if new is old or rng.random() < 0.5 else old
            if left is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = left
        folder.durable = dict(folder.names)
        for name in sorted(folder.names):
            node = folder.names[name]
            if isinstance(node, Folder):
                self._lose(node, rng)
            elif bytes(node.data) != node.durable:
                kept = rng.choice([node.durable, bytes(node.data), bytes(node.data[: len(node.data) // 2])])
                node.data, node.durable = bytearray(kept), kept


def refusal(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class Stat(NamedTuple):
    st_size: int
    st_mtime: float


class Entry:
    def __init__(self, name: str, node: File | Folder) -> None:
        self.name, self._node = name, node

    def is_dir(self, follow_symlinks: bool) -> bool:
        return isinstance(self._node, Folder)

    def is_file(self, follow_symlinks: bool) -> bool:
        return isinstance(self._node, File)

    def stat(self, follow_symlinks: bool) -> Stat:
        assert isinstance(self._node, File)
        return Stat(len(self._node.data), 0.0)


class _Handle:
    """An open file object, for reading at a place and for appending nothing."""

    def __init__(self, disk: Disk, path: str, mode: str) -> None:
        self._disk, self._at = disk, 0
        node = disk.find(path)
        if node is None and "r" not in mode:
            folder, name = disk.folder_of(path)
            node = folder.names[name] = File(disk.time())
        if not isinstance(node, File):
            raise refusal(errno.ENOENT if node is None else errno.EISDIR, path)
        self._file, self._fd = node, disk.open(node, path)

    def fileno(self) -> int:
        return self._fd

    def seek(self, at: int) -> None:
        self._at = at

    def read(self, size: int = -1) -> bytes:
        end = len(self._file.data) if size < 0 else self._at + size
        data = bytes(self._file.data[self._at : end])
        self._at += len(data)
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.open_files.pop(self._fd, None)


class Path(pathlib.PosixPath):
    disk: Disk  # of the world that is being simulated: there is one at a time
    made: ClassVar[dict[str, "Path"]] = {}

    def __truediv__(self, key: Any) -> Self:
        # What product code does most; pathlib would take it apart and put it together each time.
        text = f"{self}/{key}"
        if text not in self.made:
            self.made[text] = self.with_segments(text)
        return self.made[text]  # type: ignore[return-value]

    def resolve(self, strict: bool = False) -> Self:
        return self

    def absolute(self) -> Self:
        return self

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.disk.find(str(self)) is not None

    def is_file(self) -> bool:
        return isinstance(self.disk.find(str(self)), File)

    def is_dir(self) -> bool:
        return isinstance(self.disk.find(str(self)), Folder)

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        node = self.disk.need(str(self))
        return Stat(len(node.data), node.time) if isinstance(node, File) else Stat(0, 0.0)

    def read_bytes(self) -> bytes:
        node = self.disk.need(str(self))
        if isinstance(node, Folder):
            raise refusal(errno.EISDIR, str(self))
        return bytes(node.data)

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        return _Handle(self.disk, str(self), mode)

    def glob(self, pattern: str, **_: Any) -> Generator[Self]:
        start, _star, end = str(pattern).partition("*")
        node = self.disk.find(str(self))
        names: list[str] = sorted(node.names) if isinstance(node, Folder) else []
        yield from (self / name for name in names if name.startswith(start) and name.endswith(end))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        path = str(self)
        if self.disk.find(path) is not None:
            if exist_ok:
                return
            raise refusal(errno.EEXIST, path)
        if parents and self.disk.find(str(self.parent)) is None:
            self.parent.mkdir(parents=True, exist_ok=True)
        self.disk.change("mkdir", path)
        folder, name = self.disk.folder_of(path)
        folder.names.setdefault(name, Folder())

    def unlink(self, missing_ok: bool = False) -> None:
        path = str(self)
        if self.disk.find(path) is None and missing_ok:
            return
        self.disk.need(path)
        self.disk.change("unlink", path)
        folder, name = self.disk.folder_of(path)
        if folder.names.pop(name, None) is not None:
            self.disk.changed(path)

    def replace(self, target: Any) -> Self:
        self._named(str(target), "rename", replace=True)
        folder, name = self.disk.folder_of(str(self))
        folder.names.pop(name, None)
        return self.with_segments(target)

    def hardlink_to(self, target: Any) -> None:
        """As `os.link`: this becomes another name of `target`."""
        self.with_segments(target)._named(str(self), "link", replace=False)

    def _named(self, path: str, how: str, replace: bool) -> None:
        self.disk.change(how, path)
        node = self.disk.need(str(self))
        folder, name = self.disk.folder_of(path)
        if not replace and name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        folder.names[name] = node
        self.disk.changed(path)

    def touch(self, *_: Any, **__: Any) -> None:
        folder, name = self.disk.folder_of(str(self))
        folder.names.setdefault(name, File(self.disk.time()))
