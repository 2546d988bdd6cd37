"""Attempts at a run that log and die, each a process of its own. `python -m tests.unit.logger_attempts DIR`."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tensorboard.backend.event_processing.event_file_loader  # noqa: F401  # once, before attempts fork
import torch.utils.tensorboard.writer  # noqa: F401
import wandb  # noqa: F401

from checkpointing.events import AttemptStarted, RunStarted
from checkpointing.journal import Journal
from trainer.tracking import ContinuedTracking, end_orphaned_services

RUN_ID = "5eed" * 8


@dataclass
class Trainer:
    """What of SkyRL's config is read here; making the whole imports vLLM."""

    logger: str
    project_name: str = "project"
    run_name: str = "name"
    tags: list[str] | None = None


@dataclass
class Config:
    trainer: Trainer


def loss(step: int) -> float:
    return step / 8


def seconds(attempt: int, step: int) -> float:
    return 100.0 * attempt + step


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def log_step(tracker: ContinuedTracking, attempt: int, step: int) -> None:
    """As SkyRL and `MetricsAtStepEnd` do."""
    tracker.log({"loss": loss(step)}, step=step, commit=False)
    tracker.log({"loss": loss(step), "seconds": seconds(attempt, step)}, step=step, commit=True)


def open_tracker(directory: Path, backend: str, attempt: int) -> ContinuedTracking:
    journal = Journal(directory, "driver", attempt)
    if attempt == 1:
        journal.append(RunStarted(run_id=RUN_ID, config_digest="", planned_steps=12))
    journal.append(AttemptStarted(pid=os.getpid(), resumed_from=None, world_size=1))
    run: Any = SimpleNamespace(directory=directory, journal=journal)
    return ContinuedTracking(run, Config(Trainer(backend)))


def killed_once_saved(directory: Path, backend: str) -> None:
    tracker = open_tracker(directory, backend, 1)
    tracker.log({"eval": 0.0}, step=0, commit=True)
    for step in range(1, 6):
        log_step(tracker, 1, step)
    tracker.log({"loss": loss(6)}, step=6, commit=False)
    _die()


def killed_before_the_logger_hears(directory: Path, backend: str) -> None:
    tracker = open_tracker(directory, backend, 2)
    tracker.log({"eval": 6.0}, step=6, commit=True)
    log_step(tracker, 2, 7)
    setattr(tracker, "_send", _die)  # noqa: B010  # mypy lets nothing be assigned to a method
    tracker.log({"loss": loss(8), "seconds": seconds(2, 8)}, step=8, commit=True)


def stopped_in_a_step(directory: Path, backend: str) -> None:
    tracker = open_tracker(directory, backend, 3)
    for step in range(7, 10):
        log_step(tracker, 3, step)
    tracker.log({"loss": loss(10)}, step=10, commit=False)
    tracker.leave()


def finished(directory: Path, backend: str) -> None:
    tracker = open_tracker(directory, backend, 4)
    for step in range(9, 13):
        log_step(tracker, 4, step)
    tracker.finish()


def tear(directory: Path, backend: str) -> None:
    """A kill in the middle of a write: the newest file loses its second half."""
    name = {"tensorboard": "tensorboard/*tfevents*", "wandb": "wandb/*/run-*.wandb"}[backend]
    newest = max(directory.glob(name), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size // 2)


def in_a_process(work: Callable[[Path, str], None], directory: Path, backend: str) -> int:
    """Returns its pid, when it is dead. Forked here and not where tests run, which have threads."""
    pid = os.fork()
    if pid == 0:
        try:
            work(directory, backend)
        finally:
            os._exit(0)  # as `end_process` ends a driver
    os.waitpid(pid, 0)
    return pid


if __name__ == "__main__":
    for logger in ("tensorboard", "wandb"):
        folder = Path(sys.argv[1]) / logger
        lives = [in_a_process(killed_once_saved, folder, logger)]
        lives.append(in_a_process(killed_before_the_logger_hears, folder, logger))
        lives.append(in_a_process(stopped_in_a_step, folder, logger))
        tear(folder, logger)
        lives.append(in_a_process(finished, folder, logger))
        end_orphaned_services(set(lives))
