"""Checkpoints of format version 1 stay readable.

`golden/v1` was made once, by `build`, and is never made anew: another format is another version with its own folder.
"""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors import deserialize

from checkpointing.blobs import get_blob, put_blob
from checkpointing.canonical import canonical_json
from checkpointing.commit import Commit, commit, newest_restorable, start_attempt, valid_commits
from checkpointing.manifest import Entry, Manifest, Shard, get_manifest
from checkpointing.store import open_store
from checkpointing.tensors import pack_tensors, tensor_digest, unpack_tensors

GOLDEN = Path(__file__).parent / "golden" / "v1"


def weights(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {
        "lora.A": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) * step + rank,
        "lora.scale": torch.tensor(-0.0),
        "steps": torch.tensor([step, rank]),
    }


def manifest(folder: Path, step: int) -> Manifest:
    store = open_store(str(folder))
    shards = []
    for rank in range(2):
        tensors = weights(step, rank)
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        data = put_blob(store, canonical_json(None))
        packed = put_blob(store, pack_tensors(tensors))
        shards.append(Shard(rank=rank, tensors=packed, data=data, tensor_digests=digests))
    position = put_blob(store, canonical_json({"epoch": 0, "step": step}))
    driver = Shard(rank=0, tensors=None, data=position, tensor_digests={})
    entries = [Entry.of("policy/parameters", shards), Entry.of("driver/data_position", [driver])]
    return Manifest(
        step=step,
        topology={"policy": 2},
        entries={entry.name: entry for entry in entries},
        run={"config": "c0ffee", "dataset": "é"},
    )


def build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, a kill, and one step more."""
    nonces = count(1)
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(nonces) if size == 16 else 0:0{2 * size}x}")
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    store, newest = open_store(str(folder)), None
    for steps in [[1, 2], [3]]:
        attempt = start_attempt(store, newest)
        for step in steps:
            newest = commit(store, attempt, manifest(folder, step), newest)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_version_1_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "v1")
    store = open_store(str(tmp_path / "v1"))
    assert [(found.step, found.attempt) for found in valid_commits(store)] == [(3, 2), (2, 1), (1, 1)]
    found, rejected = newest_restorable(store)
    assert found and rejected == []
    assert found[1].step == 3 and found[1].topology == {"policy": 2} and found[1].run["dataset"] == "é"
    for made in valid_commits(store):
        read = get_manifest(store, made.manifest)
        for shard in read.entries["policy/parameters"].shards:
            assert shard.tensors
            tensors = unpack_tensors(get_blob(store, shard.tensors))
            assert {name: tensor_digest(tensor) for name, tensor in tensors.items()} == shard.tensor_digests
            expected = weights(made.step, shard.rank)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_another_program_can_verify_it() -> None:
    """With nothing of ours, by what `docs/format.md` says."""

    def compact(value: object) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def verified(reference: dict[str, Any], pattern: str) -> bytes:
        data = (GOLDEN / pattern.format(reference["digest"][:2], reference["digest"])).read_bytes()
        assert (blake3(data).hexdigest(), len(data)) == (reference["digest"], reference["size"])
        return data

    names = {"BF16": "bfloat16", "F32": "float32", "I64": "int64"}
    records = sorted(GOLDEN.glob("commits/*.json")) + sorted(GOLDEN.glob("attempts/*.json"))
    for path in records:
        record = json.loads(path.read_bytes())
        check = record.pop("check")
        assert check == blake3(compact(record)).hexdigest()
        if "manifest" not in record:
            continue
        for entry in json.loads(verified(record["manifest"], "manifests/{1}.json"))["entries"].values():
            parts = []
            for shard in entry["shards"]:
                json.loads(verified(shard["data"], "blobs/{0}/{1}"))
                for name, tensor in (
                    deserialize(verified(shard["tensors"], "blobs/{0}/{1}")) if shard["tensors"] else ()  # type: ignore[no-untyped-call]
                ):
                    header = compact([names[tensor["dtype"]], tensor["shape"]])
                    assert shard["tensor_digests"][name] == blake3(header + tensor["data"]).hexdigest()
                data = shard["data"]["digest"]
                parts.append({"rank": shard["rank"], "data": data, "tensors": shard["tensor_digests"]})
            assert entry["digest"] == blake3(compact(parts)).hexdigest()
    assert len(records) == 5


def test_version_1_is_written_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, monkeypatch)
    assert files(tmp_path) == files(GOLDEN)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "v1")
    newest_restorable(open_store(str(tmp_path / "v1")))
    assert files(tmp_path / "v1") == files(GOLDEN)


def test_version_1_can_be_continued(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "v1")
    store = open_store(str(tmp_path / "v1"))
    found, _ = newest_restorable(store)
    assert found
    fourth: Commit = commit(store, start_attempt(store, found[0]), manifest(tmp_path / "v1", 4), found[0])
    assert newest_restorable(store)[0] == (fourth, get_manifest(store, fourth.manifest))
