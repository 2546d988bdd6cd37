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
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


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


def reap(ledger: Path) -> list[str]:
    """SIGKILL every member of every session in the ledger, wait until they are gone, remove their
    temporary files, and empty the ledger.

    Returns what was ended, as "pid name".
    """
    if not ledger.exists():
        return []
    ended = []
    for line in ledger.read_text().splitlines():
        record = json.loads(line)
        while members := _members(record["session"], record["started"]):
            for process in members:
                try:
                    ended.append(f"{process.pid} {process.name()}")
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(members, timeout=10)
        shutil.rmtree(record["scratch"], ignore_errors=True)
    ledger.unlink()
    return ended


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
