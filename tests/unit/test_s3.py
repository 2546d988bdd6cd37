"""S3 when the network, the server or the credentials fail: the value is stored, or one clear error says that it is not.

Each test that breaks something requires that it was broken. The contract itself is `test_store.py`.
"""

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import CredentialRetrievalError

from chaos.proxy import FOREVER, FaultProxy
from checkpointing.blobs import Blob, get_blob, put_blob
from checkpointing.commit import start_attempt
from checkpointing.errors import ConfigError, CorruptBlob, StoreError
from checkpointing.store import AlreadyExists, KeyMissing, open_store
from checkpointing.stores import s3
from checkpointing.stores.s3 import S3Store
from harness.weed import BUCKET, SECRET_KEY, Weed

from .checkpoint_samples import save

PART = 5 << 20  # the smallest that S3 takes
LARGE = os.urandom(2 * PART + 1000)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PART_SIZE", PART)


def opened(url: str, give_up_after: float = 40) -> S3Store:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return S3Store(bucket, prefix, give_up_after=give_up_after)


@pytest.fixture
def store(s3_url: str, fault_proxy: FaultProxy) -> S3Store:
    """Through the proxy."""
    return opened(s3_url)


@pytest.fixture
def impatient(s3_url: str, fault_proxy: FaultProxy) -> S3Store:
    """The same keys, through the proxy, by a client that soon gives up."""
    return opened(s3_url, give_up_after=1)


@contextmanager
def refused(match: str) -> Iterator[None]:
    """A StoreError, and nothing secret in it nor in what is printed with it."""
    with pytest.raises(StoreError, match=match) as caught:
        yield
    assert not isinstance(caught.value, AlreadyExists | KeyMissing)
    assert SECRET_KEY not in "".join(traceback.format_exception(caught.value))


def uploads(weed: Weed, url: str) -> list[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    return [one["Key"] for one in weed.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ())]


VERBS: dict[str, Callable[[S3Store], object]] = {
    "put": lambda store: store.put("key", b"new"),
    "put of parts": lambda store: store.put("key", LARGE),
    "get": lambda store: store.get("key"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("key"),
    "create": lambda store: store.create("new-key", b"new"),
}


# Servers that are busy, away, or silent


@pytest.mark.parametrize("verb", VERBS)
def test_a_busy_server_is_asked_again(store: S3Store, fault_proxy: FaultProxy, verb: str) -> None:
    store.put("key", b"old")
    busy = fault_proxy.add("status", times=5)
    VERBS[verb](store)
    assert busy.fired == 5


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_stays_busy_is_given_up(
    store: S3Store, impatient: S3Store, fault_proxy: FaultProxy, verb: str
) -> None:
    store.put("key", b"old")
    busy = fault_proxy.add("status", times=FOREVER)
    with refused(r"cannot \w+ s3://lab/.*SlowDown.*again and again; check that server"):
        VERBS[verb](impatient)
    assert busy.fired > 2
    fault_proxy.reset()
    assert store.get("key") == b"old"


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_never_answers_is_given_up(impatient: S3Store, fault_proxy: FaultProxy, verb: str) -> None:
    silence = fault_proxy.add("hang", times=FOREVER)
    with refused("again and again"):
        VERBS[verb](impatient)
    assert silence.fired


def test_a_get_that_hangs_once_succeeds(s3_url: str, fault_proxy: FaultProxy) -> None:
    store = opened(s3_url, give_up_after=8)
    store.put("key", b"x")
    silence = fault_proxy.add("hang", "GET")
    assert store.get("key") == b"x"
    assert silence.fired


def test_a_server_that_is_not_there_is_given_up(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with refused("127.0.0.1:1.*check that server"):
        opened(s3_url, give_up_after=1).put("key", b"x")


def test_the_server_dies_amid_an_upload_and_returns(
    store: S3Store, fault_proxy: FaultProxy, s3: Weed, s3_url: str
) -> None:
    cut = fault_proxy.add("cut", "PUT", target="partNumber=2", at=PART // 2, times=FOREVER)  # so it can't finish before
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(put_blob, store, LARGE)
        assert cut.happened.wait(60)
        s3.kill()
        fault_proxy.rules.clear()
        s3.start()
        blob = put.result()
    assert get_blob(opened(s3_url), blob) == LARGE


# Connections that break


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_whose_connection_is_reset_is_sent_again(store: S3Store, fault_proxy: FaultProxy, part: int) -> None:
    cut = fault_proxy.add("cut", "PUT", target=f"partNumber={part}", at=PART // 5, times=2)
    store.put("key", LARGE)
    assert cut.fired == 2 and store.get("key") == LARGE


@pytest.mark.parametrize(
    ("method", "target"), [("PUT", "/key"), ("PUT", "partNumber=1"), ("POST", "uploads"), ("POST", "uploadId")]
)
def test_an_answer_to_a_put_is_lost(store: S3Store, fault_proxy: FaultProxy, method: str, target: str) -> None:
    lost = fault_proxy.add("lose_answer", method, target=target)
    store.put("key", b"small" if target == "/key" else LARGE)
    assert lost.fired and store.get("key") == (b"small" if target == "/key" else LARGE)


def test_a_lost_answer_to_an_own_create_is_no_rival(store: S3Store, fault_proxy: FaultProxy) -> None:
    lost = [fault_proxy.add("lose_answer", "PUT", target=name) for name in ("attempts/", "commits/")]
    attempt = start_attempt(store, None)
    record = save(store, attempt, 1, None)
    assert [rule.fired for rule in lost] == [1, 1]
    assert attempt.attempt == 1
    assert [item.key for item in store.list("")][:2] == [attempt.key, *(i.key for i in store.list("blobs/"))][:2]
    assert [item.key for item in store.list("commits/")] == [record.key]


def test_a_conflict_between_creators_is_settled_by_asking_again(store: S3Store, fault_proxy: FaultProxy) -> None:
    conflict = fault_proxy.add("status", "PUT", target="/key", status=409, code="ConditionalRequestConflict")
    store.create("key", b"mine")
    assert conflict.fired and store.get("key") == b"mine"


def test_an_upload_that_somebody_ended_starts_again(store: S3Store, fault_proxy: FaultProxy) -> None:
    ended = fault_proxy.add("status", "PUT", target="partNumber=2", status=404, code="NoSuchUpload")
    store.put("key", LARGE)
    assert ended.fired and store.get("key") == LARGE


@pytest.mark.parametrize("at", [0, 1, PART, 2 * PART])
def test_an_answer_that_ends_early_is_no_short_value(store: S3Store, fault_proxy: FaultProxy, at: int) -> None:
    store.put("key", LARGE)
    cut = fault_proxy.add("truncate", "GET", at=at, times=2)
    assert store.get("key") == LARGE
    assert cut.fired


# Bits that flip


@pytest.mark.parametrize("data", [b"small", LARGE])
@pytest.mark.parametrize("verb", ["put", "create"])
def test_what_is_damaged_on_its_way_up_is_refused_and_sent_again(
    store: S3Store, fault_proxy: FaultProxy, s3: Weed, s3_url: str, verb: str, data: bytes
) -> None:
    store.create("other", b"")
    flip = fault_proxy.add("flip_request", "PUT", at=3)
    getattr(store, verb)("key", data)
    assert flip.fired and store.get("key") == data
    assert uploads(s3, s3_url) == []


def test_what_is_always_damaged_on_its_way_up_is_an_error(
    store: S3Store, impatient: S3Store, fault_proxy: FaultProxy
) -> None:
    fault_proxy.add("flip_request", "PUT", at=3, times=FOREVER)
    with refused("BadDigest"):
        impatient.put("key", b"small")
    with pytest.raises(KeyMissing):
        store.get("key")


def test_what_is_damaged_on_its_way_down_is_no_blob(store: S3Store, fault_proxy: FaultProxy) -> None:
    blob = put_blob(store, LARGE)
    flip = fault_proxy.add("flip_answer", "GET", at=PART)
    with pytest.raises(CorruptBlob, match=blob.key):
        get_blob(store, blob)
    assert flip.fired
    assert get_blob(store, blob) == LARGE


# Credentials, buckets, servers that are not what they should be


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize("verb", VERBS)
def test_expired_credentials_are_fetched_anew(
    store: S3Store, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, verb: str, status: int
) -> None:
    store.put("key", b"old")
    sessions: list[boto3.Session] = []

    class Session(boto3.Session):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            sessions.append(self)

    monkeypatch.setattr(boto3, "Session", Session)
    expired = fault_proxy.add("status", status=status, code="ExpiredToken")
    VERBS[verb](store)
    assert expired.fired == len(sessions) == 1


def test_credentials_that_expire_amid_an_upload(store: S3Store, fault_proxy: FaultProxy) -> None:
    expired = fault_proxy.add("status", "PUT", target="partNumber=3", status=400, code="ExpiredToken")
    store.put("key", LARGE)
    assert expired.fired and store.get("key") == LARGE


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_secret_is_not_tried_again(
    store: S3Store, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"not {SECRET_KEY}")
    with refused(r"cannot .* s3://lab/.*SignatureDoesNotMatch.*correct the AWS credentials"):
        VERBS[verb](store)
    assert len(fault_proxy.requests) == 1


def test_no_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with refused("no AWS credentials for s3://lab/.*/key: set AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
        open_store(s3_url).get("key")


@pytest.mark.parametrize("verb", VERBS)
def test_the_issuer_of_credentials_is_asked_again(s3_url: str, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    opened(s3_url).put("key", b"old")
    fresh, issue = opened(s3_url), Credentials.get_frozen_credentials
    failures: list[Exception] = []

    def fail_first(self: Credentials) -> ReadOnlyCredentials:
        if not failures:
            failures.append(CredentialRetrievalError(provider="role", error_msg="not now"))
            raise failures[0]
        return issue(self)

    monkeypatch.setattr(Credentials, "get_frozen_credentials", fail_first)
    VERBS[verb](fresh)
    assert failures


def test_a_profile_that_does_not_exist(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with refused("no AWS credentials for s3://lab/.*nobody.*correct the AWS settings"):
        open_store(s3_url).get("key")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("code", ["AccessDenied", ""])
def test_permission_denied(store: S3Store, fault_proxy: FaultProxy, verb: str, code: str) -> None:
    fault_proxy.add("status", status=403, code=code, times=FOREVER)
    with refused("cannot .* s3://lab/.*allow GetObject, PutObject"):
        VERBS[verb](store)
    assert len(fault_proxy.requests) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_bucket(s3: Weed, verb: str) -> None:
    with refused("cannot .* s3://no-such-bucket/run/.*NoSuchBucket.*create the bucket"):
        VERBS[verb](opened("s3://no-such-bucket/run"))


def test_a_server_that_creates_twice_is_refused(store: S3Store, fault_proxy: FaultProxy) -> None:
    ignored = fault_proxy.add("strip", "PUT", header="if-none-match", times=FOREVER)
    with pytest.raises(ConfigError, match=r"creates a key twice.*use one that honours If-None-Match"):
        store.create("key", b"x")
    assert ignored.fired == 2
    assert list(store.list("")) == []


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "s3://B/run", "s3://lab/a//b", "s3://lab/../b", "s3://lab/a\nb"])
def test_a_bad_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"bucket|prefix"):
        open_store(url)


def test_only_s3_has_a_bandwidth(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bandwidth"):
        open_store(str(tmp_path), bandwidth=1)


# What lies in the bucket


def test_keys_lie_below_the_prefix_as_it_stands(s3: Weed, s3_url: str) -> None:
    prefix = s3_url.removeprefix(f"s3://{BUCKET}/") + "/a b ü [1] ? * # %20"
    open_store(f"s3://{BUCKET}/{prefix}/").put("k/v", b"x")
    found = s3.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix.split("/")[0])["Contents"]
    assert [entry["Key"] for entry in found] == [f"{prefix}/k/v"]
    assert list(open_store(s3_url).list("")) == []  # "a b ü ..." is a part of no key


def test_what_is_not_ours_is_not_listed(s3: Weed, s3_url: str) -> None:
    store, client = open_store(s3_url), s3.client()
    store.create("ours", b"x")
    prefix = s3_url.removeprefix(f"s3://{BUCKET}/")
    for foreign in [f"{prefix}/marker/", f"{prefix}/.hidden", f"{prefix}/a b", f"{prefix}2/c"]:
        client.put_object(Bucket=BUCKET, Key=foreign, Body=b"")
    assert [item.key for item in store.list("")] == ["ours"]


def test_a_listing_has_more_than_one_page(s3: Weed, s3_url: str) -> None:
    store = open_store(s3_url)
    keys = [f"k/{number:04}" for number in range(1001)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert [item.key for item in store.list("k/")] == keys


_WRITER = """
import sys
from checkpointing.stores import s3
s3.PART_SIZE = 5 << 20
s3.from_url(sys.argv[1]).put("key", bytes(12 << 20))
"""


def test_what_a_killed_writer_left_is_reaped_when_it_is_old(
    store: S3Store, fault_proxy: FaultProxy, s3: Weed, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = fault_proxy.add("hang", "PUT", target="partNumber=2")
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, s3_url], cwd=Path(__file__).parents[2])
    assert hang.happened.wait(60)
    writer.kill()
    writer.wait()
    with pytest.raises(KeyMissing):
        store.get("key")
    left = uploads(s3, s3_url)
    assert left == [s3_url.removeprefix(f"s3://{BUCKET}/") + "/key"]
    store.put("other", b"")  # may be alive still: a day must pass
    assert uploads(s3, s3_url) == left
    assert opened(f"{s3_url}2").reap_uploads(-60) == 0
    monkeypatch.setattr("checkpointing.stores.s3.ABANDONED_AFTER", -60)
    opened(s3_url).put("other", b"")
    assert uploads(s3, s3_url) == []


def test_that_uploads_may_not_be_reaped_is_told_and_stops_nothing(
    store: S3Store, fault_proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    denied = fault_proxy.add("status", "GET", target="uploads", status=403, code="AccessDenied")
    with caplog.at_level(logging.WARNING):
        store.put("key", b"x")
    assert denied.fired and store.get("key") == b"x"
    assert "unfinished uploads of dead writers stay" in caplog.text and "AccessDenied" in caplog.text


def test_uploads_keep_to_their_bandwidth(s3: Weed, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("checkpointing.stores.s3.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    store = open_store(s3_url, bandwidth=PART)
    blob = put_blob(store, LARGE)
    assert clock[0] == pytest.approx(102)  # the third part starts two seconds after the first
    store.put("next", b"x")
    assert clock[0] == pytest.approx(102 + 1000 / PART)
    assert get_blob(open_store(s3_url), Blob.of(LARGE)) == LARGE and blob == Blob.of(LARGE)
