"""A rank was lost: whether the driver that lost it may go on by itself, as the next attempt."""

import os
import re
import time
from pathlib import Path
from typing import Any

from checkpointing.errors import RankLost
from checkpointing.events import AttemptEnded
from checkpointing.journal import read_journal
from checkpointing.progress import read_progress
from trainer.setup import Setup

HOUR = 3600.0
LINES = 20


def may_rebuild(trainer: Any, setup: Setup, rebuilt_at: int) -> bool:
    """Whether the ranks of `trainer` may be started anew in this process: all of them had started, engines take
    adapters from disk (a collective with them would be broken), a step was done since `rebuilt_at` (what `furthest`
    was when they were last, -1 if never), and the hour's budget is not spent.

    Else the driver ends, and the supervisor, which sees more, decides.
    """
    if trainer.dispatch is None or trainer.cfg.trainer.policy.model.lora.rank == 0 or furthest(trainer) <= rebuilt_at:
        return False
    records = [(record, record.event) for record in read_journal(trainer.run.directory)]
    ended = [(record, event) for record, event in records if isinstance(event, AttemptEnded) and event.exit_code != 0]
    return sum(time.time() - record.time < HOUR for record, _ in ended) < setup.restarts_per_hour


def furthest(trainer: Any) -> int:
    """The highest step that the run of `trainer` has done, in whichever attempt."""
    done: list[int] = [trainer.step_journal.digested, *trainer.run.steps_before]
    return max(done)


def end_attempt(trainer: Any, lost: RankLost) -> None:
    """Journal what the attempt of `trainer` died of, and that its driver goes on."""
    path = os.environ.get("HARNESS_PROGRESS")
    progress = read_progress(Path(path)) if path else None
    ended = AttemptEnded(
        exit_code=lost.exit_code,
        signal=None,
        reason=str(lost),
        step=trainer.global_step,
        phase=progress.loop.phase if progress else None,
        last_lines=_last_lines(trainer.run.directory, lost),
        in_place=True,
    )
    trainer.run.journal.append(ended)
    trainer.run.journal.close()


def _last_lines(directory: Path, lost: RankLost) -> list[str]:
    """Of the log of the rank that died first, if it left one where this process can read it; else what Ray says."""
    pid = re.search(r"\(pid (\d+)\)", str(lost))
    logs = sorted((directory / "logs").glob(f"ranks-*-{pid[1]}.log")) if pid else []
    text = logs[-1].read_text(errors="replace") if logs else str(lost.__cause__ or lost)
    return [line[:500] for line in text.splitlines() if line.strip()][-LINES:]
