"""A disk for one store: ext4 in a file, mounted by a loop device over the store's folder. It needs root."""

import errno
import fcntl
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from chaos import mounts
from chaos.commands import run
from checkpointing.errors import ConfigError

_OPTIONS = "loop,commit=86400"
"""ext4 syncs names by itself every 5 s: not here, where nothing is to be safe that nobody has asked for."""

_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW: _IOWR('X', 119, int), 120, linux/fs.h
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32), fs/ext4/ext4.h
_NO_LOG_FLUSH = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: nothing more is written, the journal neither

_LOOP = 7  # the major number of loop devices, admin-guide/devices.txt


@cache
def why_not() -> str | None:
    """None where there can be such a disk, else the reason."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "disk"
        folder.mkdir()
        try:
            mount_new(Path(made) / "image", 8 << 20, folder)
        except ConfigError as error:
            return f"no disk can be made of a file here: {error}"
        unmount(folder)
    return None


def mount_new(image: Path, size: int, folder: Path) -> None:
    """Of `size` bytes, and empty. Raises ConfigError."""
    with image.open("xb") as file:
        file.truncate(size)
    run("mkfs.ext4", "-q", "-m", "0", str(image))  # -m 0: root has no reserve
    mounts.mount("-o", _OPTIONS, str(image), str(folder))


def unmount(folder: Path) -> None:
    """Every one that is mounted there."""
    while mounts.kind(folder) == "ext4":
        thaw(folder)
        mounts.unmount(folder)


def require(folder: Path) -> None:
    """Raises ConfigError where `folder` is on no disk of its own."""
    if mounts.kind(folder) != "ext4":
        raise ConfigError(f"{folder} is on no disk of its own; set `disk_bytes` in the drill")


def freeze(folder: Path) -> None:
    """What writes to it waits until `thaw`. Raises ConfigError where there is no disk, OSError."""
    with _opened(folder) as disk:
        fcntl.ioctl(disk, _FREEZE)


def thaw(folder: Path) -> None:
    """Nothing happens where it is not frozen, or is there no more. Raises OSError."""
    try:
        with _opened(folder) as disk:
            fcntl.ioctl(disk, _THAW)
    except ConfigError:
        return
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def cut_power(folder: Path) -> None:
    """What was not synced is lost: in the disk's place there is from now on a copy of what it holds, as found after a
    power cut. Who had files open keeps the old one, which refuses everything. Raises ConfigError, OSError.
    """
    with _opened(folder) as disk:
        image = _image(folder)
        fcntl.ioctl(disk, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    found = image.with_name(f"{image.name}+")
    run("cp", "--sparse=always", str(image), str(found))
    mounts.mount("-o", _OPTIONS, str(found), str(folder))  # which replays its journal


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """What is done to the descriptor can be done to no other file system: not to the machine's, should the disk have
    been unmounted meanwhile. Raises ConfigError: it is no disk of ours."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        device = os.fstat(descriptor).st_dev
        if os.major(device) != _LOOP or device == folder.parent.stat().st_dev:
            raise ConfigError(f"{folder} is on no disk of its own")
        yield descriptor
    finally:
        os.close(descriptor)


def _image(folder: Path) -> Path:
    """The file that the disk at `folder` is made of."""
    require(folder)
    device = Path(mounts.source(folder)).name
    return Path(Path(f"/sys/block/{device}/loop/backing_file").read_text().strip())
