"""Mounts over a store's folder, for what only a file system can do. They need root and the right to mount."""

import tempfile
from functools import cache
from pathlib import Path

from chaos.commands import run
from checkpointing.errors import ConfigError


@cache
def why_not() -> str | None:
    """None where a file system can be mounted here, else the reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
        except ConfigError as error:
            return f"no file system can be mounted here: {error}"
        unmount(Path(folder))
    return None


def mount(*arguments: str) -> None:
    """mount(8). Raises ConfigError with what it says."""
    run("mount", *arguments)


def unmount(folder: Path) -> None:
    """Also where a file below it is still open. Nothing happens where nothing is mounted."""
    if kind(folder) is not None:
        run("umount", "--lazy", str(folder))


def kind(folder: Path) -> str | None:
    """The type of the file system that is mounted exactly at `folder`, the newest where there are several."""
    found = _mounted(folder)
    return found[0] if found else None


def source(folder: Path) -> str:
    """What is mounted there: a device. Raises ConfigError: nothing is."""
    if (found := _mounted(folder)) is None:
        raise ConfigError(f"nothing is mounted at {folder}")
    return found[1]


def _mounted(folder: Path) -> tuple[str, str] | None:
    wanted, found = str(folder.resolve()).replace(" ", "\\040"), None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, rest = line.partition(" - ")
        if place.split()[4] == wanted:
            found = (rest.split()[0], rest.split()[1])
    return found
