"""SIGTERM and what becomes of those that get it: shared by the faults that send it."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from chaos.process import ProcessId
from chaos.scene import Scene
from checkpointing.events import RunFinished
from checkpointing.journal import read_journal

_PROMPT_SECONDS = 5.0
"""Within which a process that does nothing about SIGTERM is gone."""


def disposition(pid: int) -> Literal["ignored", "caught", "default"]:
    """What a process does about SIGTERM, as the kernel knows; see proc_pid_status(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("SigIgn", "SigCgt")))
    bit = 1 << (signal.SIGTERM - 1)
    if int(masks["SigIgn"], 16) & bit:
        return "ignored"
    return "caught" if int(masks["SigCgt"], 16) & bit else "default"


def terminate(scene: Scene, processes: Sequence[ProcessId]) -> None:
    """SIGTERM to each, the caller's own process last. Says in the notes who they were and what they do about it."""
    told = [process.model_dump() | {"does": disposition(process.pid)} for process in processes]
    scene.note({"told": told, "at": time.monotonic()})
    for process in sorted(processes, key=lambda process: process.pid == os.getpid()):
        process.send(signal.SIGTERM)


def gone_in_time(scene: Scene, grace_seconds: float) -> list[str]:
    """What became of those that were told and do not ignore it, if it became of them soon enough after it.

    Nothing can be seen of a signal in a process that ignores it, and what goes at the end of a run goes anyway.
    """
    noted = scene.noted()
    if "at" not in noted:
        return []
    passed = time.monotonic() - noted["at"]  # the same clock in every process of this machine
    gone = [
        f"{seen} {passed:.1f} s after SIGTERM"
        for told in noted["told"]
        if passed <= {"ignored": -1.0, "caught": grace_seconds, "default": _PROMPT_SECONDS}[told["does"]]
        and (seen := _process(told).what_became_of_it())
    ]
    return [] if gone and _is_finished(scene) else gone


def _process(told: Mapping[str, Any]) -> ProcessId:
    return ProcessId(pid=told["pid"], start_ticks=told["start_ticks"])


def _is_finished(scene: Scene) -> bool:
    run_dir = scene.fired.site.run_dir
    return run_dir is not None and any(isinstance(record.event, RunFinished) for record in read_journal(run_dir))
