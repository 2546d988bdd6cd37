"""What it costs a step to be supervised and journaled: everything that a real run wrote is written again, and timed.

A run with and one without would differ by more than a hundredth of a step for other reasons.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from benchmarks.profile import Profile
from benchmarks.report import Figure
from benchmarks.steps import run_config
from checkpointing.events import StepDone
from checkpointing.generations import Generation, GenerationLog
from checkpointing.journal import Journal, read_journal
from checkpointing.progress import ProgressFile
from harness.engines import EnginePool
from harness.supervisor import supervise

STEPS = 12
_DRIVER_PHASES = 12
"""Places of a step that the driver reaches, beside one for each request."""


def watching(profile: Profile) -> Iterator[Figure]:
    with profile.folder("watching") as folder:
        config = run_config(folder, STEPS, ckpt_interval=1)
        with EnginePool(config, folder) as engines:
            cpu, began = time.process_time(), time.monotonic()
            supervise(config, engines)
            share = (time.process_time() - cpu) / (time.monotonic() - began)
        records = read_journal(config.run_dir)
        done = [record for record in records if isinstance(record.event, StepDone)]
        steps = [after.time - before.time for before, after in pairwise(done)]
        requests = config.skyrl["trainer"]["train_batch_size"] * config.skyrl["generator"]["n_samples_per_prompt"]
        tokens = done[-1].event.tokens_generated // requests if isinstance(done[-1].event, StepDone) else 0
        usual = statistics.median(steps)
        supervising = share * usual  # it looks as often while an attempt starts as later
        costs = [
            supervising
            + _journal(folder / f"again-{n}", config.run_dir)
            + _step(folder / f"again-{n}", requests, tokens)
            for n in range(profile.repetitions)
        ]
    note = f"of that, the supervisor's processor time {supervising * 1000:.1f} ms"
    name = "supervision and journals / a step of the tests' model"
    yield Figure("watching", name, 0.01, costs, [usual] * len(costs), note=note)


def _journal(folder: Path, run_dir: Path) -> float:
    """Seconds per step to append what the journal of the run holds."""
    records = read_journal(run_dir)
    with closing(Journal(folder, "driver", 1)) as journal:
        began = time.monotonic()
        for record in records:
            journal.append(record.event)
        return (time.monotonic() - began) / STEPS


def _step(folder: Path, requests: int, tokens: int) -> float:
    """Seconds for one step's signs of progress and finished generations."""
    progress = ProgressFile(folder / "progress.json")
    generation = Generation(list(range(tokens)), [-0.5] * tokens, "stop", "text")
    with closing(GenerationLog(folder, 1, 1)) as log:
        began = time.monotonic()
        for number in range(requests):
            log.append(f"{number:064x}", generation)
            progress.hear("generate.request", {"step": 1})
        for _ in range(_DRIVER_PHASES):
            progress.hear("forward.begin", {"step": 1})
        return time.monotonic() - began
