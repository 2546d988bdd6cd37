"""SIGKILL: the process stops at this instruction, with no handler, no `finally` and no flush."""

import os
import signal

from chaos.directory import Fired


def available() -> str | None:
    return None


def inject(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def witness(fired: Fired) -> str | None:
    return fired.process.what_became_of_it()
