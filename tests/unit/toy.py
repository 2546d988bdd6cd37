"""A driver that trains a number instead of a model, with the harness's own commits, journal and phases around it.

`python -c DRIVER CONFIG`: each step the number becomes the digest of itself and the step. TOY_DEFECT says what is wrong
with it: "restore" or "noise".
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from harness import driver_process, supervisor
from harness.processes import spawn

_REPOSITORY = Path(__file__).parents[2]


def write_toy_run(folder: Path, steps: int) -> Path:
    """Leave `run.yaml` of such a run in `folder`, and return that."""
    run = {
        "run_dir": "runs/toy",
        "device": "cpu",
        "supervision": {"backoff_seconds": 0.0, "disk_low_bytes": 0},
        "skyrl": {"trainer.max_training_steps": steps},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder


def train_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors of this process start such drivers."""

    def start(command: Sequence[str], env: Mapping[str, str], log: Path, ledger: Path) -> subprocess.Popen[bytes]:
        return spawn([sys.executable, "-c", DRIVER, command[3]], env, log, ledger)

    monkeypatch.setattr(driver_process, "spawn", start)
    monkeypatch.setattr(supervisor, "LOOK_SECONDS", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(_REPOSITORY))
    monkeypatch.delenv("TOY_DEFECT", raising=False)


DRIVER = """
import json, os, sys
from pathlib import Path
from checkpointing.blobs import get_blob, put_blob
from checkpointing.canonical import digest
from checkpointing.commit import commit, start_attempt
from checkpointing.events import AttemptStarted, RunFinished, RunStarted, StateRestored, StepDone
from checkpointing.history import newest_restorable
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import Entry, Manifest, Shard
from checkpointing.phases import reached
from checkpointing.progress import ProgressFile
from checkpointing.settings import Checkpoints
import uuid

config = json.loads(sys.argv[1])
run_dir, planned = Path(config["run_dir"]), config["skyrl"]["trainer.max_training_steps"]
defect = os.environ.get("TOY_DEFECT", "")
progress = ProgressFile(Path(os.environ["HARNESS_PROGRESS"]))
reached("driver.started", role="driver", attempt=1)
store = Checkpoints.model_validate(config["checkpoints"]).open(run_dir)
found, _ = newest_restorable(store)
attempt = start_attempt(store, found[0] if found else None)
journal = Journal(run_dir, "driver", attempt.attempt)
if not read_journal(run_dir):
    count = int(os.environ.get("HARNESS_FAULTS_PLANNED", "0"))
    journal.append(RunStarted(run_id=uuid.uuid4().hex, config_digest="c", planned_steps=planned, faults_planned=count))
step, number, parent = 0, digest(b"start"), None
journal.append(AttemptStarted(pid=os.getpid(), resumed_from=found[1].step if found else None, world_size=1))
if found:
    reached("restore.begin", step=found[1].step)
    parent, entry = found[0], found[1].entries["policy/parameters"]
    step, number = found[1].step, get_blob(store, entry.shards[0].data).decode()
    if defect == "restore":
        number = digest(b"another")
    journal.append(StateRestored(step=step, entries={"policy/parameters": number}, seconds=0.0))
    reached("restore.end", step=step)
while step < planned:
    step += 1
    reached("generate.begin", step=step)
    reached("train.begin", step=step)
    number = digest(f"{number}{step}{os.getpid() if defect == 'noise' else ''}".encode())
    scalars = {"reward/avg_raw_reward": (step / 3).hex(), "policy_loss": (step / 7).hex()}
    journal.append(
        StepDone(step=step, epoch=0, seconds=0.1, digest_seconds=0.0, state={"policy/parameters": number},
                 data={"tokens": digest(str(step).encode())}, scalars=scalars, zero_advantages=False)
    )
    reached("step.trained", step=step)
    shard = Shard(rank=0, tensors=None, data=put_blob(store, number.encode()), tensor_digests={})
    entry = Entry.of("policy/parameters", [shard])
    manifest = Manifest(step=step, topology={"policy": 1}, entries={entry.name: entry}, run={})
    parent = commit(store, attempt, manifest, parent)
    reached("save.committed", step=step)
journal.append(RunFinished(planned_steps=planned, last_step=step))
"""
