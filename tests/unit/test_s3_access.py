"""Who may reach a store on S3, and whether what lies there is encrypted: asked of a real server."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.proxy import FOREVER, FaultProxy
from checkpointing.errors import ConfigError, StoreError
from checkpointing.replication import RUN_KEY
from checkpointing.replicator import Job
from checkpointing.settings import Checkpoints
from checkpointing.store import Store, open_store
from harness.weed import BUCKET, KMS_KEY, ROLE, SECRET_KEY, Weed

from .checkpoint_samples import train
from .cli_samples import harness

PART = 5 << 20
WRITES: dict[str, Callable[[Store], None]] = {
    "put": lambda store: store.put("key", b"x"),
    "put of parts": lambda store: store.put("key", bytes(PART + 1)),
    "create": lambda store: store.create("key", b"x"),
}


def encryption(weed: Weed, url: str, key: str) -> tuple[Any, Any]:
    """(algorithm, key) of an object, as the server says."""
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    said = weed.client().head_object(Bucket=BUCKET, Key=f"{prefix}/{key}")
    return said.get("ServerSideEncryption"), said.get("SSEKMSKeyId")


# Encryption


@pytest.mark.parametrize("write", WRITES)
def test_the_server_encrypts_what_is_stored(
    s3_url: str, s3: Weed, fault_proxy: FaultProxy, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpointing.stores.s3.PART_SIZE", PART)
    WRITES[write](open_store(s3_url, kms_key=KMS_KEY))
    assert encryption(s3, s3_url, "key") == ("aws:kms", KMS_KEY)
    # Parts of an upload, and its end, are of the object that its beginning was said of.
    said = [head for head in map(str.lower, fault_proxy.heads) if re.match("(put|post) (?!.*uploadid=)", head)]
    assert said
    for head in said:
        assert "x-amz-server-side-encryption: aws:kms\r\n" in head
        assert f"x-amz-server-side-encryption-aws-kms-key-id: {KMS_KEY}\r\n" in head
    assert open_store(s3_url).get("key")[:1] in (b"x", b"\0")  # reading needs no setting, only permission


@pytest.mark.parametrize("write", WRITES)
def test_without_the_setting_the_bucket_decides(s3_url: str, s3: Weed, fault_proxy: FaultProxy, write: str) -> None:
    WRITES[write](open_store(s3_url))
    assert encryption(s3, s3_url, "key") == (None, None)
    assert "encryption" not in "".join(fault_proxy.heads).lower()


def test_all_that_replication_stores_is_encrypted(s3_url: str, s3: Weed, source: Store, tmp_path: Path) -> None:
    source.create(RUN_KEY, b'{"run_id":"a"}')
    train(source, None, 1, 2)
    job = Job(
        run_dir=tmp_path, urls=(f"file://{tmp_path}/source", s3_url), attempt=1, parent=os.getpid(), backlog=9,
        kms_key=KMS_KEY, drain=True,
    )  # fmt: skip
    command = [sys.executable, "-m", "checkpointing.replicator", job.model_dump_json()]
    assert subprocess.run(command, check=False).returncode == 0
    keys = [item.key for item in open_store(s3_url).list("")]
    assert {key.partition("/")[0] for key in keys} == {"attempts", "blobs", "commits", "manifests", RUN_KEY}
    assert {encryption(s3, s3_url, key) for key in keys} == {("aws:kms", KMS_KEY)}


def test_all_that_a_run_stores_is_encrypted(s3_url: str, s3: Weed, tmp_path: Path) -> None:
    """Of a run whose first tier is S3: drivers open it so, `harness repair` too."""
    store = Checkpoints(tiers=(s3_url,), kms_key=KMS_KEY).open(tmp_path).primary.store
    train(store, None, 1)
    assert {encryption(s3, s3_url, item.key) for item in store.list("")} == {("aws:kms", KMS_KEY)}


def test_a_key_for_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoints\.kms_key: none of checkpoints\.tiers is s3://"):
        Checkpoints(kms_key=KMS_KEY).open(tmp_path)
    with pytest.raises(ConfigError, match="kms_key are for s3:// alone"):
        open_store(str(tmp_path), kms_key=KMS_KEY)


@pytest.mark.parametrize("code", ["KMS.NotFoundException", "KMS.DisabledException"])
@pytest.mark.parametrize("write", WRITES)
def test_a_key_that_can_not_be_used_is_told_at_once(
    s3_url: str, fault_proxy: FaultProxy, code: str, write: str
) -> None:
    fault_proxy.add("status", status=400, code=code, times=FOREVER)
    with pytest.raises(StoreError, match=rf"cannot .*{code}.*correct checkpoints\.kms_key"):
        WRITES[write](open_store(s3_url, kms_key="no-such-key"))
    assert len(fault_proxy.requests) == 1


# Credentials, roles, buckets


VERBS: dict[str, Callable[[Store], object]] = WRITES | {
    "get": lambda store: store.get("key"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("key"),
}


@pytest.fixture
def as_role(s3: Weed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ROLE)


@pytest.mark.usefixtures("as_role")
def test_a_role_works_below_its_prefix(s3_url: str) -> None:
    url = s3_url.replace(f"s3://{BUCKET}/", f"s3://{BUCKET}/{ROLE}/")
    train(open_store(url), None, 1)
    assert harness("check", url).code == 0


@pytest.mark.usefixtures("as_role")
@pytest.mark.parametrize("verb", VERBS)
def test_a_prefix_outside_the_role_is_refused_by_the_server(s3_url: str, fault_proxy: FaultProxy, verb: str) -> None:
    with pytest.raises(StoreError, match=rf"cannot .* {s3_url}.*AccessDenied.*allow GetObject, PutObject"):
        VERBS[verb](open_store(s3_url))
    assert len(fault_proxy.requests) == 1


@pytest.mark.parametrize(
    ("setting", "url", "complaint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, f"s3://{BUCKET}/a", "SignatureDoesNotMatch.*correct the AWS credentials"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, f"s3://{BUCKET}/a", "InvalidAccessKeyId.*correct the AWS credentials"),
        ({"AWS_ACCESS_KEY_ID": ROLE}, f"s3://{BUCKET}/a", "AccessDenied.*allow GetObject"),
        ({}, "s3://no-such-bucket/a", "NoSuchBucket.*create the bucket"),
    ],
    ids=["wrong secret", "no such key", "outside the role", "no bucket"],
)
def test_the_command_line_says_it_in_one_line(
    s3: Weed, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], url: str, complaint: str
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    said = harness("check", url)
    assert said.code == StoreError.exit_code and said.out == "" and len(said.err.splitlines()) == 1
    assert re.search(complaint, said.err) and SECRET_KEY not in said.err
