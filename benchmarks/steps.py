"""What checkpoints cost a whole GRPO run: real ranks, a real engine, a checkpoint after every step against none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow import parquet

from benchmarks.profile import Profile
from benchmarks.report import Figure
from checkpointing.events import StepDone
from checkpointing.journal import read_journal
from harness.config import RunConfig, load_config
from harness.engines import EnginePool
from harness.supervisor import supervise
from trainer.maze.task import build_task

STEPS = 12
_REPOSITORY = Path(__file__).parents[1]
_NEVER = 1000
"""Steps. The run is one epoch long, so that its only save comes after the last step done."""


def steps(profile: Profile) -> Iterator[Figure]:
    with profile.folder("steps") as folder:
        seconds: dict[int, list[float]] = {1: [], _NEVER: []}
        with EnginePool(run_config(folder, STEPS, _NEVER), folder) as engines:
            _run(run_config(folder / "warm-up", STEPS, _NEVER), engines)
            for index, interval in enumerate((_NEVER, 1, 1, _NEVER)):
                seconds[interval].append(_run(run_config(folder / f"run-{index}", STEPS, interval), engines))
    note = "the tests' maze model; both digest the State every step"
    yield Figure("steps", "step with a checkpoint / step without", 1.03, seconds[1], seconds[_NEVER], note=note)


def run_config(folder: Path, steps: int, ckpt_interval: int) -> RunConfig:
    """The tests' run in `folder`, cut to one epoch of `steps` steps."""
    config = load_config(_REPOSITORY / "configs" / "test.yaml", RunConfig)
    assert config.maze is not None
    settings: dict[str, Any] = config.model_dump()
    folder.mkdir(exist_ok=True)
    few = folder / "train.parquet"
    prompts = steps * settings["skyrl"]["trainer"]["train_batch_size"]
    task = build_task(_REPOSITORY / "build" / "maze", config.maze)
    parquet.write_table(parquet.read_table(task.train).slice(0, prompts), few)
    settings["skyrl"]["data"]["train_data"] = [str(few)]
    settings["skyrl"]["trainer"] |= {"epochs": 1, "ckpt_interval": ckpt_interval}
    settings["skyrl"]["trainer"]["policy"]["model"]["path"] = str(task.model)
    return RunConfig.model_validate(settings | {"run_dir": folder / "run"})


def _run(config: RunConfig, engines: EnginePool) -> float:
    """Seconds from one step done to the next, over the run. The first step, which warms everything up, is left out."""
    supervise(config, engines)
    done = [record.time for record in read_journal(config.run_dir) if isinstance(record.event, StepDone)]
    if len(done) != STEPS:
        raise RuntimeError(f"{config.run_dir}: {len(done)} steps done, {STEPS} expected; see its logs")
    return (done[-1] - done[0]) / (STEPS - 1)
