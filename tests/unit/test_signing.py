"""A checkpoint whose signature does not hold, or that lacks one where it is required, is not restored."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import trainer.run
from checkpointing.canonical import canonical_json, digest
from checkpointing.commit import Commit, start_attempt
from checkpointing.errors import CheckpointError, ConfigError, RunMismatch
from checkpointing.events import CheckpointRejected
from checkpointing.history import newest_restorable
from checkpointing.journal import read_journal
from checkpointing.manifest import manifest_key
from checkpointing.replication import RUN_KEY, repair, replicate
from checkpointing.replicator import Job
from checkpointing.settings import Checkpoints
from checkpointing.signing import ANYBODY, KEY_VARIABLE, Signer, Signing, Trust
from checkpointing.store import Store, open_store
from checkpointing.tiers import Tiers
from harness.runs import TIERS_KEY, checkpoints_of, leave_tiers
from trainer.run import Run, open_run

from .checkpoint_samples import blob_keys, flip, save, train
from .cli_samples import harness

pytestmark = pytest.mark.usefixtures("unsynced")

MINE, ANOTHERS = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
SIGNER = Signer(MINE)
TRUST = Trust(keys=(SIGNER.public,), required=True)


def pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.fixture(autouse=True)
def _no_key_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    (tmp_path / "key.pem").write_bytes(pem(MINE))
    return tmp_path / "key.pem"


class Signed(NamedTuple):
    """Steps 1 and 2 of one attempt, both signed. `raw`: the store without anybody's opinion of it."""

    url: str
    raw: Store
    commits: list[Commit]

    def restored(self, trust: Trust = TRUST) -> tuple[int | None, list[str]]:
        """(step, why newer ones were rejected)"""
        found, rejected = newest_restorable(Tiers.open([self.url], trust=trust))
        return found and found[0].step, [one.reason for one in rejected]


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    url = f"file://{tmp_path}/signed"
    _, commits = train(raw := open_store(url), None, 1, 2, signer=SIGNER)
    return Signed(url, raw, commits)


def edit(store: Store, key: str, **changes: Any) -> None:
    """Forge a record: its check is right again. None removes a field."""
    body = json.loads(store.get(key)) | changes
    body = {name: value for name, value in body.items() if name != "check" and (value is not None or name == "parent")}
    store.put(key, canonical_json(body | {"check": digest(canonical_json(body))}))


# What is restored


def test_a_signed_checkpoint_restores_for_whoever_trusts_its_key(signed: Signed) -> None:
    assert signed.restored() == (2, [])
    assert signed.restored(ANYBODY) == (2, [])
    assert signed.restored(Trust(keys=("0" * 64, SIGNER.public))) == (2, [])
    assert [found.version for found in signed.commits] == [2, 2]


PARTS: dict[str, Callable[[Signed], str]] = {
    "blob": lambda signed: next(
        key for key in blob_keys(signed.raw, signed.commits[1]) if key not in blob_keys(signed.raw, signed.commits[0])
    ),
    "manifest": lambda signed: manifest_key(signed.commits[1].manifest),
    "commit": lambda signed: signed.commits[1].key,
}


@pytest.mark.parametrize("part", PARTS)
def test_one_changed_byte_and_it_does_not_restore(signed: Signed, part: str) -> None:
    flip(signed.raw, PARTS[part](signed))
    step, reasons = signed.restored()
    assert step == 1 and len(reasons) == 1


def test_every_single_byte_of_the_commit_is_covered(signed: Signed) -> None:
    key = signed.commits[1].key
    whole = signed.raw.get(key)
    for place in range(len(whole)):
        signed.raw.put(key, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert signed.restored()[0] == 1, f"byte {place} of {whole!r}"
    signed.raw.put(key, whole)
    assert signed.restored() == (2, [])


FORGERIES: dict[str, Any] = {
    "another step's manifest": lambda signed: {"manifest": signed.commits[0].manifest.model_dump()},
    "another parent": lambda signed: {"parent": None},
    "another value": lambda signed: {"signature": {"key": SIGNER.public, "value": "0" * 128}},
    "the signature of another step": lambda signed: {"signature": signed.commits[0].signature.model_dump()},
    "the name of another signer": lambda signed: {
        "signature": {"key": Signer(ANOTHERS).public, "value": signed.commits[1].signature.value}
    },
    "no point of the curve": lambda signed: {"signature": {"key": "f" * 64, "value": "0" * 128}},
    "nonsense": lambda signed: {"signature": [1]},
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("trust", [TRUST, ANYBODY], ids=["required", "anybody"])
def test_a_forged_record_with_a_right_check_is_not_believed(signed: Signed, forgery: str, trust: Trust) -> None:
    edit(signed.raw, signed.commits[1].key, **FORGERIES[forgery](signed))
    step, (reason,) = signed.restored(trust)
    assert step == 1 and "its signature does not hold" in reason


def test_a_signature_by_another_key_is_not_believed(signed: Signed) -> None:
    body = json.loads(signed.raw.get(signed.commits[1].key))
    del body["check"], body["signature"]
    forged = Signer(ANOTHERS).sign(canonical_json(body))
    edit(signed.raw, signed.commits[1].key, signature=forged.model_dump())
    step, (reason,) = signed.restored()
    assert (
        step == 1 and f"signed by {Signer(ANOTHERS).public}, which is not among checkpoints.signing.trusted" in reason
    )
    assert signed.restored(ANYBODY) == (2, [])


@pytest.mark.parametrize("version", [1, 2])
def test_an_unsigned_one_does_not_restore_where_signatures_are_required(signed: Signed, version: int) -> None:
    """As it stands, and as what remains when somebody takes the signature away."""
    edit(signed.raw, signed.commits[1].key, version=version, signature=None)
    step, (reason,) = signed.restored()
    assert step == 1 and "is not signed, and checkpoints.signing requires that it is" in reason
    assert signed.restored(Trust(keys=(SIGNER.public,))) == (2, [])


def test_none_at_all_is_an_error_and_no_start_from_the_beginning(store: Store, tmp_path: Path) -> None:
    train(store, None, 1, 2)
    with pytest.raises(CheckpointError, match=r"none of 2 commits can be restored(.|\n)*is not signed"):
        newest_restorable(Tiers.open([str(tmp_path / "store")], trust=TRUST))


def test_a_copy_that_is_not_believed_is_passed_over_for_one_that_is(signed: Signed, tmp_path: Path) -> None:
    far = open_store(str(tmp_path / "far"))
    for found in signed.commits:
        replicate(signed.raw, far, None, found)
    edit(signed.raw, signed.commits[1].key, signature=None, version=1)
    tiers = Tiers.open([signed.url, str(tmp_path / "far")], trust=TRUST)
    restored, rejected = newest_restorable(tiers)
    assert restored and restored[0] == signed.commits[1] and rejected == []


# What a run does


CFG = SimpleNamespace(trainer=SimpleNamespace(seed=1, resume_mode="latest"))


@pytest.fixture
def _small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_ATTEMPT", raising=False)
    monkeypatch.setattr(trainer.run, "identity", lambda cfg, dataset: {"config": "c0ffee"})
    monkeypatch.setattr(trainer.run, "topology", lambda cfg: {"policy": 2})
    monkeypatch.setattr(trainer.run, "get_config_as_dict", lambda cfg: {})


def opened(directory: Path, signing: Signing | None) -> Run:
    return open_run(directory, Checkpoints(signing=signing), CFG, "dataset", 3)


@pytest.mark.usefixtures("_small_run")
def test_a_run_signs_falls_back_and_says_so(tmp_path: Path, key_file: Path) -> None:
    signing = Signing(key_file=key_file)
    first = opened(tmp_path / "run", signing)
    store, newest = first.tiers.primary.store, None
    for step in (1, 2):
        newest = save(store, first.attempt, step, newest, f"step {step}", first.signer)
    assert newest and opened(tmp_path / "run", signing).resumed_step == 2
    edit(open_store(str(tmp_path / "run" / "store")), newest.key, manifest={"digest": "0" * 64, "size": 1})
    assert opened(tmp_path / "run", signing).resumed_step == 1
    events = [record.event for record in read_journal(tmp_path / "run")]
    (said,) = [event for event in events if isinstance(event, CheckpointRejected)]
    assert said.commit == newest.key and "its signature does not hold" in said.reason


@pytest.mark.usefixtures("_small_run")
def test_a_run_that_requires_signatures_and_finds_none_stops(tmp_path: Path, key_file: Path) -> None:
    unsigned = opened(tmp_path / "run", None)
    save(unsigned.tiers.primary.store, unsigned.attempt, 1, None)
    with pytest.raises(CheckpointError, match="is not signed"):
        opened(tmp_path / "run", Signing(key_file=key_file))
    assert opened(tmp_path / "run", Signing(key_file=key_file, required=False)).resumed_step == 1


@pytest.mark.usefixtures("_small_run")
def test_a_run_that_could_not_restore_what_it_saves_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no key to sign with.*Set key_file or {KEY_VARIABLE}"):
        opened(tmp_path / "run", Signing(trusted=(SIGNER.public,)))


@pytest.mark.usefixtures("_small_run")
def test_a_checkpoint_of_a_run_of_another_kind_is_refused_although_it_is_signed(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run.json` is signed by nobody: whoever writes to the store can put another run's checkpoints there."""
    signing = Signing(key_file=key_file)
    run = opened(tmp_path / "run", signing)
    save(run.tiers.primary.store, run.attempt, 1, None, signer=run.signer)
    monkeypatch.setattr(trainer.run, "identity", lambda cfg, dataset: {"config": "another"})
    monkeypatch.setattr(trainer.run, "claim_directory", lambda *args: "run id")
    with pytest.raises(RunMismatch, match="was made with another config"):
        opened(tmp_path / "run", signing)


# Tiers, repair, and what people see


def test_replication_and_repair_carry_the_signature_unchanged(signed: Signed, tmp_path: Path) -> None:
    far = f"file://{tmp_path}/far"
    tiers = Tiers.open([signed.url, far], trust=TRUST)
    for found in signed.commits:
        replicate(tiers.primary.store, tiers.all[1].store, None, found)
    for found in signed.commits:
        assert open_store(far).get(found.key) == signed.raw.get(found.key)
    edit(signed.raw, signed.commits[1].key, version=1, signature=None)
    assert repair(tiers, tiers.primary, read_data=False).written == (signed.commits[1].key,)
    assert open_store(far).get(signed.commits[1].key) == signed.raw.get(signed.commits[1].key)
    assert newest_restorable(Tiers.open([signed.url], trust=TRUST))[0]


def test_the_replicator_carries_only_what_is_believed(signed: Signed, tmp_path: Path) -> None:
    """The process itself, as a run starts it."""
    edit(signed.raw, signed.commits[1].key, version=1, signature=None)
    job = Job(
        run_dir=tmp_path, urls=(signed.url, f"file://{tmp_path}/far"), attempt=1, parent=os.getpid(), backlog=9,
        trust=TRUST, drain=True,
    )  # fmt: skip
    command = [sys.executable, "-m", "checkpointing.replicator", job.model_dump_json()]
    assert subprocess.run(command, check=False).returncode == 0
    assert [item.key for item in open_store(str(tmp_path / "far")).list("commits/")] == [signed.commits[0].key]


@pytest.fixture
def run(tmp_path: Path, key_file: Path) -> Path:
    """A run directory with two signed commits, as a supervisor leaves it."""
    directory = tmp_path / "run"
    leave_tiers(directory, Checkpoints(signing=Signing(key_file=key_file)))
    near = open_store(str(directory / "store"))
    near.create(RUN_KEY, b'{"run_id":"a"}')
    train(near, None, 1, 2, signer=SIGNER)
    return directory


def test_check_reports_signatures_and_needs_no_private_key(run: Path, key_file: Path) -> None:
    key_file.unlink()
    said = harness("check", run)
    assert said.code == 0 and f"signatures: 2 by {SIGNER.public}; 0 checkpoints are not signed" in said.out
    assert f"signatures: 2 by {SIGNER.public}" in harness("check", f"file://{run}/store").out
    found = json.loads(harness("check", run, "--json").out)
    assert (found["signers"], found["unsigned"]) == ({SIGNER.public: 2}, 0)
    private = pem(MINE).split(b"\n")[1]
    assert (
        private not in (run / TIERS_KEY).read_bytes() and str(key_file).encode() not in (run / TIERS_KEY).read_bytes()
    )
    assert checkpoints_of(run).signing == Signing(trusted=(SIGNER.public,))


def test_check_says_what_is_not_believed(run: Path) -> None:
    near = open_store(str(run / "store"))
    edit(near, "commits/0000000002-000001.json", version=1, signature=None)
    said = harness("check", run)
    assert said.code == 12 and "is not signed" in said.out and "can resume from step 1" in said.out
    assert "damaged" in harness("checkpoints", run).out
    assert harness("export", run, run.with_name("out"), "--step", "2").code == 10


def test_check_says_nothing_of_signatures_where_there_are_none(store: Store, tmp_path: Path) -> None:
    train(store, None, 1)
    assert "sign" not in harness("check", f"file://{tmp_path}/store").out


# Keys


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, pem(MINE).decode())
    signer = Signing().signer()
    assert signer and signer.public == SIGNER.public
    assert Signing(trusted=("0" * 64,)).trust() == Trust(keys=(SIGNER.public, "0" * 64), required=True)


def test_no_key_at_all_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no key; set key_file"):
        Checkpoints(signing=Signing()).open(Path("run"))


PUBLIC = MINE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("content", [b"", b"sesame-of-mine", PUBLIC, b"\xff\xfe"])
def test_what_is_no_private_key_is_refused_and_not_repeated(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="not an Ed25519 private key in PEM form") as caught:
        Signing(key_file=tmp_path / "key").trust()
    assert "sesame" not in str(caught.value) and caught.value.__cause__ is None


def test_a_key_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints\.signing\.key_file: .*absent.*mount the key there"):
        Signing(key_file=tmp_path / "absent").signer()


def test_a_private_key_has_no_place_in_the_config() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        Signing.model_validate({"key": pem(MINE).decode()})
    with pytest.raises(ValueError, match="pattern"):
        Signing.model_validate({"trusted": [pem(MINE).decode()]})


def test_an_unsigned_attempt_goes_on_in_a_signed_run(store: Store, tmp_path: Path) -> None:
    """Old checkpoints stay readable, and what follows is signed."""
    _, (one,) = train(store, None, 1)
    attempt = start_attempt(store, one)
    two = save(store, attempt, 2, one, signer=SIGNER)
    trust = Trust(keys=(SIGNER.public,))
    assert newest_restorable(Tiers.open([str(tmp_path / "store")], trust=trust))[0] is not None
    assert (one.version, two.version) == (1, 2)
