"""A stock SkyRL checkpoint is imported into a run that requires signatures, by the command itself: what comes of it is
signed by that run's key, restores, and does not once anybody has touched it."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import trainer.run
from checkpointing.commit import Commit
from checkpointing.errors import CheckpointError, ConfigError
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import get_manifest, manifest_key
from checkpointing.settings import Checkpoints
from checkpointing.signing import KEY_VARIABLE, Signing
from checkpointing.store import Store, open_store
from harness.config import RunConfig, load_config
from harness.runs import checkpoints_of
from trainer.maze.data import draw_mazes, write_rows
from trainer.maze.spec import MazeSpec
from trainer.run import Run, open_run

from .checkpoint_samples import flip
from .cli_samples import harness
from .test_interchange import PROMPTS, saved
from .test_signing import ANOTHERS, MINE, SIGNER, edit, pem

__all__ = ["saved"]

ROOT = Path(__file__).parents[2]
STEP = 5


def write_config(folder: Path, base: Path, signing: dict[str, Any]) -> Path:
    """Of a run in `folder`/run that can go on from what the two ranks of `saved` have saved."""
    plain = load_config(ROOT / "configs" / "test.yaml", RunConfig).model_dump(mode="json")
    write_rows(draw_mazes(MazeSpec(train=PROMPTS))[0], folder / "train.parquet")
    plain["skyrl"]["data"]["train_data"] = [str(folder / "train.parquet")]
    plain["skyrl"]["trainer"]["policy"]["model"] = {"path": str(base), "lora": {"rank": 3, "alpha": 16}}
    plain |= {"run_dir": str(folder / "run"), "maze": None, "checkpoints": {"signing": signing}}
    (folder / "run.yaml").write_text(yaml.safe_dump(plain))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def imported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory. The key was in the environment, whose process starts another to import."""
    folder = tmp_path_factory.mktemp("imported")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(KEY_VARIABLE, pem(MINE).decode())
        said = harness("import", write_config(folder, saved / "base", {}), saved / "lora" / f"global_step_{STEP}")
    assert said.code == 0, said
    return folder / "run"


@pytest.fixture
def run(imported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to spoil."""
    monkeypatch.delenv("HARNESS_ATTEMPT", raising=False)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    return Path(shutil.copytree(imported, tmp_path / "run"))


def raw(run: Path) -> Store:
    return open_store(str(run / "store"))


def first(run: Path) -> Commit:
    [found] = valid_commits(raw(run))
    return found


def opened(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any = MINE) -> Run:
    """The next attempt, of the same config as far as the digests of its identity say."""
    (tmp_path / "key.pem").write_bytes(pem(key))
    mine = get_manifest(raw(run), first(run).manifest).run
    monkeypatch.setattr(trainer.run, "identity", lambda cfg, dataset: mine)
    monkeypatch.setattr(trainer.run, "claim_directory", lambda *args: "run id")
    monkeypatch.setattr(trainer.run, "topology", lambda cfg: {"policy": 2})
    cfg = SimpleNamespace(trainer=SimpleNamespace(seed=1, resume_mode="latest"))
    return open_run(run, Checkpoints(signing=Signing(key_file=tmp_path / "key.pem")), cfg, "dataset", 9)


def test_it_is_signed_by_the_importing_runs_key_and_restores(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = first(run)
    assert (found.step, found.version) == (STEP, 2)
    assert found.signature and found.signature.key == SIGNER.public
    assert checkpoints_of(run).signing == Signing(trusted=(SIGNER.public,)), "whose are believed from now on"
    checked = harness("check", run, "--read-data")
    assert checked.code == 0, checked
    assert f"signatures: 1 by {SIGNER.public}; 0 checkpoints are not signed" in checked.out
    assert harness("export", run, tmp_path / "adapter").code == 0
    assert opened(run, tmp_path, monkeypatch).resumed_step == STEP


def parameters(run: Path) -> str:
    """Key of the blob with what rank 1 trained."""
    blob = get_manifest(raw(run), first(run).manifest).entries["policy/parameters"].shards[1].tensors
    assert blob is not None
    return blob.key


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "blob": (lambda run: flip(raw(run), parameters(run)), "blobs/.* is damaged"),
    "manifest": (lambda run: flip(raw(run), manifest_key(first(run).manifest)), "manifests/.* is damaged"),
    "commit": (lambda run: flip(raw(run), first(run).key), "commits/.* is damaged"),
    "no signature": (lambda run: edit(raw(run), first(run).key, version=1, signature=None), "commits/.* is not signed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_that_somebody_touched_is_refused(run: Path, tmp_path: Path, change: str) -> None:
    """To go on from and to export, with one error each."""
    spoil, reason = CHANGES[change]
    spoil(run)
    tiers = Checkpoints(signing=Signing(trusted=(SIGNER.public,))).open(run)
    with pytest.raises(CheckpointError, match=rf"none of 1 commits can be restored(.|\n)*{reason}"):
        newest_restorable(tiers)
    said = harness("export", run, tmp_path / "adapter")
    assert (said.code, said.out, said.err.count("error: ")) == (CheckpointError.exit_code, "", 1), said
    assert re.search(reason, said.err) and "Traceback" not in said.err
    assert not (tmp_path / "adapter").exists()


def test_a_run_with_another_key_does_not_begin_with_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=f"is signed by {SIGNER.public}, which is not among"):
        opened(run, tmp_path, monkeypatch, ANOTHERS)


def test_without_a_key_to_sign_with_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    config = write_config(tmp_path, tmp_path, {"trusted": [SIGNER.public]})
    said = harness("import", config, tmp_path / "stock")
    assert (said.code, said.out) == (ConfigError.exit_code, "")
    assert re.fullmatch(r"error: checkpoints\.signing: signatures are required, and there is no key .*\n", said.err)
    assert not (tmp_path / "run").exists()
