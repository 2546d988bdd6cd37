"""Everything a process started is ended with it, orphans that have renamed themselves included; nothing else is."""

import json
import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil

from harness.processes import SHARED_MEMORY, reap, spawn

# Starts a child, says its pid, and waits. The child outlives a SIGKILL of its parent and has nothing but the session.
LEADER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
print(child.pid, flush=True)
time.sleep(600)
"""


def start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    process = spawn([sys.executable, "-c", LEADER], os.environ, folder / "log", folder / "sessions")
    while not (folder / "log").read_text().endswith("\n"):
        time.sleep(0.05)
    return process, int((folder / "log").read_text())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_orphan_is_ended_after_its_leader_was_killed(tmp_path: Path) -> None:
    process, child = start(tmp_path)
    scratch = Path(json.loads((tmp_path / "sessions").read_text())["scratch"])
    assert scratch.is_dir()
    process.kill()
    process.wait()
    assert not gone(child), "the orphan must be alive, or nothing is shown"
    assert [line.split()[0] for line in reap(tmp_path / "sessions")] == [str(child)]
    assert gone(child)
    assert not scratch.exists()
    assert not (tmp_path / "sessions").exists()
    assert reap(tmp_path / "sessions") == []


def test_a_session_whose_number_was_given_to_another_process_is_left_alone(tmp_path: Path) -> None:
    process, child = start(tmp_path)
    record = json.loads((tmp_path / "sessions").read_text())
    (tmp_path / "other").write_text(json.dumps(record | {"started": record["started"] - 1000}) + "\n")
    assert reap(tmp_path / "other") == []
    assert not gone(child)
    reap(tmp_path / "sessions")
    process.wait()


SHARING = """
import multiprocessing, os, sys, time
from multiprocessing import shared_memory
lock = multiprocessing.get_context("spawn").Lock()
block = shared_memory.SharedMemory(create=True, size=4096)
print(block._name.lstrip("/"), lock._semlock.name.lstrip("/"), flush=True)
time.sleep(600)
"""


def test_shared_memory_of_what_was_killed_is_given_back(tmp_path: Path) -> None:
    """As vLLM's core leaves it: whoever would unlink it is killed in the same moment. Nobody else's is touched."""
    ours = shared_memory.SharedMemory(create=True, size=4096)
    try:
        process = spawn([sys.executable, "-c", SHARING], os.environ, tmp_path / "log", tmp_path / "sessions")
        while not (tmp_path / "log").read_text().endswith("\n"):
            time.sleep(0.05)
        block, semaphore = (tmp_path / "log").read_text().split()
        left = [SHARED_MEMORY / block, SHARED_MEMORY / f"sem.{semaphore}"]
        assert all(path.exists() for path in left), "or nothing is shown"
        reap(tmp_path / "sessions")
        process.wait()
        assert [path for path in left if path.exists()] == []
        assert (SHARED_MEMORY / ours.name).exists()
    finally:
        ours.close()
        ours.unlink()
