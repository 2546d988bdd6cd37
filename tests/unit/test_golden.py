"""Checkpoints of format versions 1 and 2 stay readable. Version 2 is version 1 with signed commits.

`golden/v1` and `golden/v2` were made once, by `build`, and are never made anew: another format is another version with
its own folder.
"""

import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from safetensors import deserialize

from checkpointing.blobs import get_blob, put_blob
from checkpointing.canonical import canonical_json
from checkpointing.commit import Commit, commit, start_attempt
from checkpointing.history import newest_restorable, valid_commits
from checkpointing.manifest import Entry, Manifest, Shard, get_manifest
from checkpointing.signing import Signer, Trust
from checkpointing.store import open_store
from checkpointing.tensors import pack_tensors, tensor_digest, unpack_tensors
from checkpointing.tiers import Tiers

GOLDEN = Path(__file__).parent / "golden" / "v1"
GOLDEN_2 = GOLDEN.with_name("v2")
SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


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


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, signer: Signer | None = None) -> None:
    """Two steps, a kill, and one step more."""
    nonces = count(1)
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(nonces) if size == 16 else 0:0{2 * size}x}")
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    store, newest = open_store(str(folder)), None
    for steps in [[1, 2], [3]]:
        attempt = start_attempt(store, newest)
        for step in steps:
            newest = commit(store, attempt, manifest(folder, step), newest, signer)


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


def test_version_2_is_read_by_those_who_trust_its_key_and_its_rest_is_version_1(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN_2, tmp_path / "v2")
    trust = Trust(keys=(SIGNER.public,), required=True)
    found, rejected = newest_restorable(Tiers.open([str(tmp_path / "v2")], trust=trust))
    assert found and rejected == [] and (found[0].step, found[0].version) == (3, 2)
    one, two = ({name: data for name, data in files(of).items() if "commits/" not in name} for of in (GOLDEN, GOLDEN_2))
    assert one == two


def test_another_program_can_verify_a_signature() -> None:
    """With nothing of ours, by what `docs/format.md` says."""
    paths = sorted(GOLDEN_2.glob("commits/*.json"))
    for path in paths:
        record = json.loads(path.read_bytes())
        assert record["version"] == 2
        signature, _ = record.pop("signature"), record.pop("check")
        signed = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["key"]))
        public.verify(bytes.fromhex(signature["value"]), signed)
        with pytest.raises(InvalidSignature):
            public.verify(bytes.fromhex(signature["value"]), signed + b" ")
    assert len(paths) == 3


def test_version_2_is_written_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, monkeypatch, SIGNER)
    assert files(tmp_path) == files(GOLDEN_2)
