"""What run.json and the journal say a run was made with."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import trainer.provenance
import trainer.run
from checkpointing.events import RanksBuilt
from checkpointing.journal import read_journal
from checkpointing.settings import Checkpoints
from trainer.provenance import commit, machine, provenance
from trainer.run import open_run

IMAGE = "example.com/harness@sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan 22 04:25:41 UTC 2025\n", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95  Release Build  (dvs)\n", "580.95"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_the_driver_of_the_machine(tmp_path: Path, line: str | None, version: str | None) -> None:
    file = tmp_path / "version"
    if line is not None:
        file.write_text(line)
    assert provenance({}, file)["nvidia_driver"] == version


def test_what_a_rank_says_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine("a", tmp_path / "none") == ("a", None, None)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan 22 2025\n")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert machine("a", tmp_path / "version") == ("a", "570.86.15", provenance({})["nccl"])
    assert provenance({})["nccl"]


def test_a_trainer_journals_what_its_ranks_say(tmp_path: Path) -> None:
    """In a process of its own, which imports SkyRL's workers: three ranks on two nodes, each with another driver."""
    code = f"""
import trainer.cpu
from pathlib import Path
from types import SimpleNamespace
from skyrl.train.trainer import RayPPOTrainer
from checkpointing.journal import Journal
import trainer.provenance, trainer.resumable, trainer.workers

nodes, drivers = iter("aab"), iter(["570.86.15", "570.86.15", "580.95"])
trainer.provenance._nvidia_driver = lambda file: next(drivers)
ranks = [trainer.workers.StatefulRank.__new__(trainer.workers.StatefulRank) for _ in range(3)]
trainer.workers.ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: next(nodes))
RayPPOTrainer.build_models = lambda self, *workers: None
trainer.resumable.ask_all_ranks = lambda self, method: {{"policy": [getattr(rank, method)() for rank in ranks]}}
made = trainer.resumable.ResumableTrainer.__new__(trainer.resumable.ResumableTrainer)
made.run = SimpleNamespace(journal=Journal(Path({str(tmp_path)!r}), "driver", 2))
made.start_keepers = lambda: None
made.dispatch = SimpleNamespace(save_weights_for_sampler=None)
made.build_models()
assert made.nodes == {{'policy': ['a', 'a', 'b']}}
"""
    environment = os.environ | {"HARNESS_DEVICE": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    [record] = read_journal(tmp_path)
    assert record.attempt == 2
    assert record.event == RanksBuilt(nvidia_driver={"a": "570.86.15", "b": "580.95"}, nccl={"a": None, "b": None})


def test_nccl_is_torchs() -> None:
    """Built for CUDA on both profiles; the library's package has its own word for its version."""
    found = provenance({})["nccl"]
    [packaged] = [d.version for d in importlib.metadata.distributions() if d.name.startswith("nvidia-nccl")]
    assert found == packaged


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here, as in the image")
def test_the_commit_is_the_images_or_the_work_trees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert commit({"HARNESS_COMMIT": "abc"}) == "abc"
    monkeypatch.setattr(trainer.provenance, "__file__", str(tmp_path / "trainer" / "provenance.py"))
    (tmp_path / "trainer").mkdir()
    assert commit({"HARNESS_COMMIT": ""}) is None  # an image built without one
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "c"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit({}) == head


def test_run_json_records_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = SimpleNamespace(trainer=SimpleNamespace(seed=1, resume_mode="latest"))
    monkeypatch.setattr(trainer.run, "identity", lambda cfg, dataset: {"config": "c0ffee"})
    monkeypatch.setattr(trainer.run, "topology", lambda cfg: {"policy": 1})
    monkeypatch.setattr(trainer.run, "get_config_as_dict", lambda cfg: {})
    monkeypatch.delenv("HARNESS_ATTEMPT", raising=False)
    for image in (IMAGE, "another"):
        monkeypatch.setenv("HARNESS_IMAGE", image)
        open_run(tmp_path, Checkpoints(), cfg, "dataset", 3)
    record = json.loads((tmp_path / "store" / "run.json").read_text())
    assert record["made_with"].keys() == {"image", "commit", "nccl", "nvidia_driver"}
    assert record["made_with"]["image"] == IMAGE
    assert record["versions"]["torch"]
