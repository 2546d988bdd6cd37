"""Faults of a disk that a store has for itself: a real ext4, in a file."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from chaos import disks, faults, mounts
from chaos.directory import PlanDirectory, Site
from chaos.process import ProcessId
from chaos.scene import Scene
from checkpointing.disk import fsync_dir
from checkpointing.errors import ConfigError
from checkpointing.store import open_store

from .fault_samples import running, scene, until

needs_disks = pytest.mark.skipif(disks.why_not() is not None, reason=str(disks.why_not()))
BYTES = bytes(range(256)) * 1000

SLEEPS = """
import time
print("ready", flush=True)
time.sleep(600)
"""

WRITES = """
import sys, time
print("ready", flush=True)
for index in range(10**9):
    try:
        open(f"{sys.argv[1]}/{index}", "wb").write(bytes(4096))
    except OSError as error:
        open(sys.argv[1] + "-errors", "a").write(str(error))
    time.sleep(0.01)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "store"
    folder.mkdir()
    disks.mount_new(tmp_path / "image", 16 << 20, folder)
    yield folder
    disks.unmount(folder)
    assert mounts.kind(folder) is None
    # The loop device is free: nothing holds the file.
    assert until(lambda: str(tmp_path) not in subprocess.check_output(["losetup", "--list"], text=True))


def of(name: str, folder: Path) -> tuple[faults.Fault, Scene]:
    site = Site(stores={"store:file": f"file://{folder}"})
    return faults.load(name), scene(folder.parent / "plan", name, "store:file", site=site, seconds=60)


def write(path: Path, sync: bool) -> None:
    with path.open("wb") as file:
        file.write(BYTES)
        file.flush()
        if sync:
            os.fsync(file.fileno())
            fsync_dir(path.parent)


@needs_disks
def test_disk_full(store: Path) -> None:
    (store / "before").write_bytes(BYTES)
    fault, at = of("disk_full", store)
    assert fault.witness(at) is None
    fault.inject(at)
    assert "No space left" in (fault.witness(at) or "")
    assert (store / "before").read_bytes() == BYTES
    with pytest.raises(OSError, match="No space left"):
        write(store / "meanwhile", sync=True)
    (store / "meanwhile").unlink()
    fault.heal(at)
    fault.heal(at)
    assert fault.witness(at) is None
    write(store / "after", sync=True)


@needs_disks
def test_a_slow_store_is_late_and_loses_nothing(store: Path) -> None:
    fault, at = of("store_slow", store)
    assert fault.witness(at) is None
    fault.inject(at)
    try:
        assert "to write and sync one byte took" in (until(lambda: fault.witness(at)) or "")
        began = time.monotonic()
        for index in range(5):
            write(store / str(index), sync=True)
            time.sleep(0.25)
        assert time.monotonic() - began > 2.0, "of 1.2 s a second is lost"
    finally:
        fault.heal(at)
    fault.heal(at)
    assert all((store / str(index)).read_bytes() == BYTES for index in range(5))
    assert fault.witness(at) is None


@needs_disks
def test_turns_that_do_nothing_are_not_seen(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, at = of("store_slow", store)
    monkeypatch.setattr(fault, "_TURNS", "import time; time.sleep(60)")
    fault.inject(at)
    assert not until(lambda: fault.witness(at), 1.0)
    fault.heal(at)


@needs_disks
def test_what_was_not_synced_is_lost_with_who_wrote_it(store: Path) -> None:
    write(store / "synced", sync=True)
    write(store / "unsynced", sync=False)
    fault, at = of("lost_writes", store)
    plan = PlanDirectory(store.parent / "plan")
    plan.announce("supervisor", ProcessId.current())
    assert fault.witness(at) is None
    with running(WRITES, store) as driver, running(SLEEPS) as engine:
        plan.announce("driver", driver)
        plan.announce("engine:0", engine)
        fault.inject(at)
        assert until(driver.what_became_of_it)
        assert engine.what_became_of_it() is None
    assert not (store.parent / "store-errors").exists(), "it did not live to see that its disk was gone"
    said = fault.witness(at)
    assert said == "of 7000 bytes that were written and not synced 0 are left"
    assert (store / "synced").read_bytes() == BYTES
    assert not (store / "unsynced").exists()
    write(store / "after", sync=True)
    fault.heal(at)


@needs_disks
@pytest.mark.parametrize("syncs", [True, False])
def test_a_store_that_does_not_sync_loses_all_and_ours_nothing(
    store: Path, syncs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, keys = open_store(f"file://{store}"), [f"blobs/{index:064x}" for index in range(5)]
    with monkeypatch.context() as without:
        if not syncs:
            without.setattr(os, "fsync", lambda descriptor: None)
        for key in keys:
            ours.put(key, BYTES)
    fault, at = of("lost_writes", store)
    fault.inject(at)
    assert fault.witness(at)
    assert [item.key for item in ours.list("blobs/")] == (keys if syncs else [])
    assert not syncs or all(ours.get(key) == BYTES for key in keys)


@needs_disks
def test_a_power_cut_that_loses_nothing_is_not_seen(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, at = of("lost_writes", store)
    monkeypatch.setattr(disks, "cut_power", lambda folder: os.sync())
    fault.inject(at)
    assert fault.witness(at) is None


@pytest.mark.parametrize("name", ["disk_full", "store_slow", "lost_writes"])
def test_it_needs_a_disk_of_its_own(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos.disks.why_not", lambda: None)
    monkeypatch.setattr(faults.find(name), "available", lambda: None)
    (tmp_path / "store").mkdir()
    fault, at = of(name, tmp_path / "store")
    with pytest.raises(ConfigError, match="set `disk_bytes` in the drill"):
        fault.inject(at)
    fault.heal(at)


def test_it_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disks.why_not.cache_clear()
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        assert "mkfs.ext4 is not installed" in (disks.why_not() or "")
    disks.why_not.cache_clear()


@needs_disks
def test_thawed_or_not_it_can_be_unmounted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    disks.mount_new(tmp_path / "image", 16 << 20, folder)
    disks.cut_power(folder)
    disks.freeze(folder)
    disks.unmount(folder)
    assert mounts.kind(folder) is None


@pytest.mark.parametrize("do", [disks.freeze, disks.cut_power, disks.thaw])
def test_the_machine_s_own_file_system_is_left_alone(
    tmp_path: Path, do: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds the fault may outlive the disk."""
    done: list[object] = []
    monkeypatch.setattr("chaos.disks.fcntl.ioctl", lambda *told: done.append(told))
    monkeypatch.setattr("chaos.disks._image", lambda folder: tmp_path / "image")
    with nullcontext() if do is disks.thaw else pytest.raises(ConfigError, match="no disk of its own"):
        do(tmp_path)
    assert done == []
