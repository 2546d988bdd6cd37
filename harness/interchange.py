"""What `harness export` and `harness import` do."""

import json
import subprocess
import sys
from os import environ
from pathlib import Path

from rich.console import Console

from checkpointing.commit import Commit
from checkpointing.errors import CheckpointError, ConfigError
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import Manifest, get_manifest
from checkpointing.promotion import promote
from checkpointing.tiers import Tiers
from harness.commands import prepare
from harness.config import RunConfig, load_config
from harness.ending import as_error, last_words
from harness.runs import find_run, leave_tiers
from trainer.determinism import environment


def export_run(run: str, out: Path, step: int | None, form: str, promoted_as: str | None, console: Console) -> None:
    """Write a checkpoint of `run`, the newest unless `step` says which, to the new folder `out`."""
    tiers = find_run(run).tiers
    found, manifest = _choose(tiers, step)
    if promoted_as:  # first: from now on no retention deletes it
        promote(tiers, promoted_as, found)
    if form == "orbax":
        from trainer.interchange.orbax import export_orbax

        export_orbax(tiers, manifest, out)
    else:
        from trainer.interchange.huggingface import export_huggingface

        export_huggingface(tiers, manifest, json.loads(tiers.get("run.json"))["config"], out)
    console.print(f"step {manifest.step} of {run} written to {out} as {form}")


def _choose(tiers: Tiers, step: int | None) -> tuple[Commit, Manifest]:
    if step is None:
        newest, _ = newest_restorable(tiers, read_data=False)
        if newest is None:
            raise CheckpointError("this run has no checkpoint yet")
        return newest
    for found in valid_commits(tiers):
        if found.step == step:
            return found, get_manifest(tiers, found.manifest)
    raise ConfigError(f"this run has no checkpoint of step {step}; `harness checkpoints` lists those that it has")


def import_stock_run(path: Path, stock: Path, console: Console) -> None:
    """Make a stock SkyRL checkpoint the beginning of the run that `path` describes.

    Raises:
        ConfigError: signatures are required and there is no key to sign with.
        HarnessError: as the child process says; see trainer/importing.py.
    """
    config = load_config(path, RunConfig)
    config.checkpoints.signer()  # before anything is read or written
    prepare(config, console)
    log = config.run_dir / "logs" / "import.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # A process of its own, whose environment is right from its first instruction, as for training.
    # Whether there are engines of its own, and how many, is part of what a run is; where they are is not.
    urls = json.dumps(["http://127.0.0.1:1"] * (config.engines.count if config.engines else 0))
    command = [sys.executable, "-m", "harness.driver", config.model_dump_json(), urls, str(stock.resolve())]
    with log.open("ab") as sink:
        ended = subprocess.run(command, env=environ | environment(config.device), stdout=sink, stderr=sink, check=False)
    if ended.returncode != 0:
        raise as_error(ended.returncode, last_words(log))
    leave_tiers(config.run_dir, config.checkpoints)  # so that `harness check` knows them before the run goes on
    console.print(f"{config.run_dir}: begins with {stock}; `harness run {path}` goes on from there")
