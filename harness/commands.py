"""What `harness run`, `verify` and `train` do."""

import math
from pathlib import Path

from rich.console import Console

from chaos.verdict import compare
from checkpointing.errors import ConfigError, HarnessError
from checkpointing.events import Evaluated, RunFinished, StepDone
from checkpointing.journal import Record, read_journal
from harness.config import RunConfig, load_config
from harness.engines import EnginePool
from harness.progress import RunProgress
from harness.supervisor import supervise
from trainer.maze.task import build_task


def prepare(config: RunConfig, console: Console) -> None:
    """Build the maze task and its base model where the config asks for them and they are not there yet."""
    if config.maze is not None:
        with console.status("building the maze task and its base model"):
            build_task(Path("build/maze"), config.maze)


def run_to_end(
    config: RunConfig, console: Console, label: str, engines: EnginePool, faults: Path | None = None
) -> None:
    with RunProgress(config.run_dir, console, label) as progress:
        supervise(config, engines, faults, progress.update)


def run_config(path: Path, console: Console) -> None:
    start(load_config(path, RunConfig), console)


def start(config: RunConfig, console: Console) -> None:
    """Train to the end, or say that this has been done. Raises like `supervise`."""
    prepare(config, console)
    if any(isinstance(record.event, RunFinished) for record in read_journal(config.run_dir)):
        console.print(f"{config.run_dir}: already complete")
        return
    with EnginePool(config, config.run_dir / "logs") as engines:
        run_to_end(config, console, config.run_dir.name, engines)
    console.print(f"{config.run_dir}: complete")


def read_run(directory: Path) -> list[Record]:
    """The journal of a run directory.

    Raises:
        ConfigError: there is none.
    """
    records = read_journal(directory)
    if not records:
        raise ConfigError(f"{directory}: no journal there; name a run directory")
    return records


def verify_runs(baseline: Path, subject: Path, console: Console, as_json: bool) -> int:
    verdict = compare(read_run(baseline), read_run(subject))
    if as_json:
        console.print_json(verdict.model_dump_json())
    else:
        shown = "bit-identical" if verdict.outcome == "identical" else verdict.outcome
        console.print(f"{shown}: {verdict.steps_compared} steps, {verdict.entries_compared} values compared")
        for reason in verdict.reasons:
            console.print(f"  {reason}")
    return verdict.exit_code


def digest_share(records: list[Record]) -> float:
    """Time spent digesting the State as a share of step time, 0 to 1."""
    steps = [record.event for record in records if isinstance(record.event, StepDone)]
    total = sum(step.seconds + step.digest_seconds for step in steps)
    return sum(step.digest_seconds for step in steps) / total if total else 0.0


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson score)."""
    z, share = 1.959964, successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return centre - half, centre + half


SUCCESS = "eval/all/environment/success"


def train_and_compare(path: Path, console: Console) -> int:
    """Run `path`, then report success on held-out mazes before and after. 0 only if the intervals do not overlap."""
    config = load_config(path, RunConfig)
    if config.maze is None:
        raise ConfigError(f"{path}: `harness train` needs a `maze:` section")
    run_config(path, console)
    evaluations = [r.event for r in read_run(config.run_dir) if isinstance(r.event, Evaluated)]
    if len(evaluations) < 2 or evaluations[0].step != 0:
        raise HarnessError(f"{config.run_dir}: needs an evaluation before training and one after it")
    trials, rows = config.maze.held_out, []
    for name, event in (("base model", evaluations[0]), (f"after {evaluations[-1].step} steps", evaluations[-1])):
        share = event.metrics[SUCCESS]
        low, high = wilson(share * trials, trials)
        rows.append((low, high))
        console.print(
            f"{name:>16}: {share:6.1%} of {trials} held-out mazes solved, 95% interval {low:.1%} to {high:.1%}"
        )
    improved = rows[1][0] > rows[0][1]
    console.print("the intervals do not overlap: training improved the model" if improved else "not shown to be better")
    return 0 if improved else HarnessError.exit_code
