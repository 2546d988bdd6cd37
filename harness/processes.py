"""Starting processes so that they can be ended with everything they started, whoever has died in between.

Each process of ours leads a session, and what it starts stays in that session: Ray's daemons and workers, vLLM's core
and worker processes. (An environment variable would not do: vLLM and Ray rename their processes and overwrite it.)
Sessions are recorded in a ledger on disk, so that a new supervisor can end what a killed one has left behind.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def _die_with_parent() -> None:
    """The kernel ends this child when the supervisor dies, however it dies. (What the child started: see `reap`.)"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def spawn(command: Sequence[str], env: Mapping[str, str], log: Path, ledger: Path) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a session that the ledger knows, its output appended to `log`.

    Its temporary files (sockets, Ray's session, loggers' folders) go where `reap` removes them.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    ledger.parent.mkdir(parents=True, exist_ok=True)
    # Not in the run directory: the path of a Unix socket must stay under 108 characters.
    scratch = tempfile.mkdtemp(prefix="harness-")
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            env={**env, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  supervisors run no threads
        )
    started = psutil.Process(process.pid).create_time()
    with ledger.open("a") as lines:
        lines.write(json.dumps({"session": process.pid, "started": started, "scratch": scratch}) + "\n")
        lines.flush()
        os.fsync(lines.fileno())
    return process


def scratch_of(ledger: Path) -> Path:
    """Where the session that the ledger knows last has its temporary files, until `reap`."""
    return Path(json.loads(ledger.read_text().splitlines()[-1])["scratch"])


def _members(session: int, started: float) -> list[psutil.Process]:
    """Living processes of a session. A session whose leader is another process than recorded is not ours: [].

    While a session has members its number is not given to a new process, so members without a leader are ours.
    """
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) != session or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.pid == session and abs(process.create_time() - started) > 1:
                return []
            members.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return members


def reap(ledger: Path, look: Callable[[], None] = lambda: None) -> list[str]:
    """SIGKILL every member of every session in the ledger, wait until they are gone, `look` once more, remove their
    temporary files and shared memory, and empty the ledger.

    Returns what was ended, as "pid name".
    """
    if not ledger.exists():
        return []
    ended, shared = [], set[int]()
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    for record in records:
        while members := _members(record["session"], record["started"]):
            shared |= {inode for process in members for inode in _mapped(process)}
            for process in members:
                try:
                    ended.append(f"{process.pid} {process.name()}")
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(members, timeout=10)
    look()
    for record in records:
        shutil.rmtree(record["scratch"], ignore_errors=True)
    for entry in os.scandir(SHARED_MEMORY):
        if entry.inode() in shared and entry.is_file(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)
    ledger.unlink()
    return ended


def _mapped(process: psutil.Process) -> set[int]:
    """Inodes of the shared memory that `process` has mapped. By inode, since semaphores are mapped under other names.

    Who is killed can't unlink its own: an engine of vLLM leaves a queue of up to 160 MiB, and semaphores.
    """
    try:
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return set()  # gone
    fields = [line.split(maxsplit=5) for line in lines]
    return {int(of[4]) for of in fields if len(of) == 6 and of[5].startswith(f"{SHARED_MEMORY}/")}


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
