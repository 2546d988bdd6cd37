"""Every mistake a user can make: one clear error, its exit code, nothing changed on disk."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import ConfigError, FormatError, HarnessError, RunMismatch
from checkpointing.history import newest_restorable
from checkpointing.store import open_store
from harness.config import RunConfig
from trainer.determinism import environment

from .conftest import REPOSITORY


def harness(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "red"}, "colour"),
        ({"supervision": {"restarts_per_hour": "many"}}, "restarts_per_hour"),
        ({"device": "tpu"}, "device"),
        ({"skyrl": {"trainer": {"ckpt_path": "elsewhere"}}}, "run_dir"),
        ({"skyrl": None}, "skyrl"),
    ],
)
def test_our_own_keys(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    config = tmp_path / "bad.yaml"
    good = {"run_dir": str(tmp_path / "run"), "device": "cpu", "skyrl": {}}
    config.write_text(yaml.safe_dump(good | change))
    result = harness("run", str(config))
    assert result.returncode == ConfigError.exit_code
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_no_such_config_and_no_such_run(tmp_path: Path) -> None:
    for arguments in (("run", "nowhere.yaml"), ("verify", str(tmp_path), str(tmp_path))):
        result = harness(*arguments)
        assert result.returncode == ConfigError.exit_code
        assert len(result.stderr.strip().splitlines()) == 1


def what_a_driver_says(cases: list[RunConfig]) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.stack.check_config"],
        input="".join(config.model_dump_json() + "\n" for config in cases),
        env=os.environ | environment("cpu"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [json.loads(line[5:]) for line in result.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == len(cases), result.stderr[-3000:]
    return said


def test_what_a_driver_refuses(baseline: Any, configure: Callable[..., RunConfig], tmp_path: Path) -> None:
    plain, theirs = configure("accepted"), configure("baseline").run_dir
    before = contents(theirs)
    other_data = tmp_path / "other.parquet"
    table = parquet.read_table(plain.skyrl["data"]["train_data"][0])
    parquet.write_table(table.take(list(reversed(range(table.num_rows)))), other_data)
    other_tokenizer = tmp_path / "tokenizer"
    shutil.copytree(plain.skyrl["trainer"]["policy"]["model"]["path"], other_tokenizer)
    tokenizer = other_tokenizer / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"added_by_test": 1}))

    def in_their_directory(**keys: Any) -> RunConfig:
        return configure("baseline", **keys)

    cases: list[tuple[RunConfig, type[HarnessError] | None, str]] = [
        (plain, None, "accepted"),
        (configure("a", **{"trainer.colour": "red"}), ConfigError, "colour"),
        (configure("b", **{"trainer.epochs": "many"}), ConfigError, "epochs"),
        (configure("c", **{"trainer.policy.model.path": "nowhere"}), ConfigError, "nowhere"),
        (configure("d", **{"data.train_data": ["nowhere.parquet"]}), ConfigError, "nowhere.parquet"),
        (configure("e", **{"trainer.strategy": "megatron"}), ConfigError, "megatron"),
        (configure("f", **{"trainer.fully_async.enabled": True}), ConfigError, "async"),
        (configure("g", **{"trainer.ckpt_interval": -1}), ConfigError, "ckpt_interval"),
        (configure("h", **{"trainer.train_batch_size": 400}), ConfigError, "fewer than"),
        (in_their_directory(**{"trainer.policy.optimizer_config.lr": 0.5}), RunMismatch, "another config"),
        (in_their_directory(**{"data.train_data": [str(other_data)]}), RunMismatch, "another dataset"),
        (in_their_directory(**{"trainer.policy.model.path": str(other_tokenizer)}), RunMismatch, "another tokenizer"),
    ]
    said = what_a_driver_says([config for config, _, _ in cases])
    for (_, kind, words), message in zip(cases, said, strict=True):
        start = f"{kind.__name__} {kind.exit_code}: " if kind else "accepted"
        assert message.startswith(start) and words in message, f"{start} {words} expected, got {message}"
    assert contents(theirs) == before
    assert [name for name in "abcdefgh" if (theirs.parent / name).exists()] == []


def test_foreign_and_newer_formats_are_refused(
    baseline: Any, configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """On a copy of a real run's newest commit."""
    shutil.copytree(configure("baseline").run_dir / "store", tmp_path / "store")
    store = open_store(str(tmp_path / "store"))
    found, _ = newest_restorable(store)
    assert found is not None
    commit = found[0]
    for change in ({"version": 3}, {"format": "somebody-elses"}):
        record = json.loads(store.get(commit.key)) | change
        record.pop("check")
        store.put(commit.key, canonical_json(record | {"check": digest(canonical_json(record))}))
        with pytest.raises(FormatError, match=str(*change.values())):
            newest_restorable(store)
