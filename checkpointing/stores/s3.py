"""A prefix of an S3 bucket as a store: a key is an object below it. For S3 and whatever honours its If-None-Match.

Objects are moved by obstore, in parts that each carry a checksum which the server verifies; it tries a request again by
itself, and what that does not cure is cured by doing the whole verb again. boto3 finds credentials and lists.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Buffer, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import boto3
import obstore
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, PartialCredentialsError, ProfileNotFound
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store as Objects
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_random_exponential

from checkpointing.errors import AlreadyExists, ConfigError, KeyMissing, StoreError
from checkpointing.store import Item, Promises, Store, check_key, is_key
from checkpointing.stores.s3_errors import Expired, Transient, explained

_log = logging.getLogger(__name__)

PART_SIZE = 16 << 20
"""Bytes. A value larger than this goes up in parts of it, so that a fault costs one part."""

CONCURRENCY = 8
"""Parts on their way at once; values in parts take turns. More would not be faster, only each part slower, until a
request takes so long that it counts as hung."""

MAX_PARTS = 10_000
"""Of one object, by the rules of S3."""

PATIENCE = 30.0
"""Seconds that one request may take to send a part, or an answer to go on, before it counts as hung."""

GIVE_UP_AFTER = 60.0
"""Seconds of failing until a verb ends as StoreError. A server that takes requests and never answers can double it."""

ABANDONED_AFTER = 24 * 3600
"""Seconds until an unfinished upload is taken for a dead writer's. A live writer that loses one starts it again."""

_NOT_AT_ONCE = timedelta(days=1)
"""obstore limits whole requests, downloads of any size included, unless told otherwise; progress is limited instead."""


class _Connection(NamedTuple):
    objects: Objects
    api: Any
    """boto3's client."""


def from_url(url: str, bandwidth: int | None = None, kms_key: str | None = None) -> Store:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.removesuffix("/")
    parts = prefix.split("/") if prefix else []
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        raise ConfigError(f"store {url!r}: {bucket!r} is no bucket; give one, as in s3://bucket/runs/run1")
    if not all(part.isprintable() and part not in ("", ".", "..") for part in parts):
        raise ConfigError(f"store {url!r}: the prefix may not hold empty parts, '.', '..' or control characters")
    return S3Store(bucket, prefix, bandwidth, kms_key=kms_key)


class S3Store:
    """`bandwidth`: bytes per second that all puts of this object may take together. `kms_key`: as in `open_store`."""

    promises = Promises(atomic_put=True, durable_on_return=True, create_once=True)

    def __init__(
        self,
        bucket: str,
        prefix: str,
        bandwidth: int | None = None,
        give_up_after: float = GIVE_UP_AFTER,
        kms_key: str | None = None,
    ) -> None:
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._pace = _Pace(bandwidth) if bandwidth else None
        self._give_up_after = give_up_after
        self._encryption: dict[str, Any] = {}
        if kms_key:
            self._encryption = {"server_side_encryption": "aws:kms", "sse_kms_key_id": kms_key}
        self._connection: _Connection | None = None
        self._one_in_parts = threading.Lock()
        self._reaped = self._honours_conditions = False

    def put(self, key: str, data: Buffer) -> None:
        path, view = self._path(key), memoryview(data).cast("B")
        part_size = max(PART_SIZE, -(-len(view) // MAX_PARTS))

        def once(to: _Connection) -> None:
            paced = self._pace.through(view, part_size) if self._pace else view
            if len(view) <= part_size:
                obstore.put(to.objects, path, paced, use_multipart=False)
                return
            with self._one_in_parts:
                obstore.put(to.objects, path, paced, chunk_size=part_size, max_concurrency=CONCURRENCY)

        self._verb("write", path, once)
        self._reap_once()

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._verb("read", path, lambda at: bytes(obstore.get(at.objects, path).bytes()))

    def list(self, prefix: str) -> Sequence[Item]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        path = self._root + prefix

        def once(at: _Connection) -> list[Item]:
            # Not by obstore: it takes a prefix for a folder, and fails at a foreign object whose key holds "//".
            pages = at.api.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=path)
            found = [
                (entry["Key"].removeprefix(self._root), entry["Size"])
                for page in pages
                for entry in page.get("Contents", ())
            ]
            return sorted(Item(key, size) for key, size in found if is_key(key))

        return self._verb("list", path, once)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._verb("delete", path, lambda at: obstore.delete(at.objects, path))
        except KeyMissing:
            return

    def create(self, key: str, data: Buffer) -> None:
        path = self._path(key)
        if not self._honours_conditions:
            self._require_conditions()
            self._honours_conditions = True
        self._create(path, data)

    def reap_uploads(self, older_than_s: float) -> int:
        """Abort uploads below the prefix that were begun more than `older_than_s` seconds ago: their writers are taken
        for dead, their parts are invisible and cost money. Returns how many."""
        before = datetime.now(UTC) - timedelta(seconds=older_than_s)

        def once(at: _Connection) -> int:
            pages = at.api.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=self._root)
            uploads = [one for page in pages for one in page.get("Uploads", ()) if one["Initiated"] < before]
            for one in uploads:
                at.api.abort_multipart_upload(Bucket=self._bucket, Key=one["Key"], UploadId=one["UploadId"])
            return len(uploads)

        return self._verb("end abandoned uploads", self._root, once)

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _reap_once(self) -> None:
        """After the first put that succeeds: what dead writers left is in nobody's way, so a refusal stops nothing."""
        if self._reaped:
            return
        self._reaped = True
        try:
            self.reap_uploads(ABANDONED_AFTER)
        except StoreError as error:
            _log.warning("unfinished uploads of dead writers stay, and cost money: %s", error)

    def _create(self, path: str, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._verb("create", path, lambda at: obstore.put(at.objects, path, view, mode="create"))

    def _require_conditions(self) -> None:
        """Some servers ignore If-None-Match: of two creators both would win. Raises ConfigError.

        The key begins with a dot, as no part of a key does, and stays: permission to delete is not needed to train.
        """
        try:
            for _ in range(2):
                self._create(f"{self._root}.if-none-match", b"")
        except AlreadyExists:
            return
        raise ConfigError(
            f"s3://{self._bucket}/{self._root}: this server creates a key twice, so nothing could fence an attempt that"
            " is over; use one that honours If-None-Match"
        )

    def _verb[T](self, doing: str, path: str, once: Callable[[_Connection], T]) -> T:
        """`once`, until it succeeds, can't, or has failed for too long. All errors leave here as StoreError."""
        where = f"s3://{self._bucket}/{path}"

        def attempt() -> T:
            try:
                self._connection = connection = self._connection or self._connect(where)
                return once(connection)
            except (BaseError, FileNotFoundError, BotoCoreError, ClientError) as error:
                failure = explained(error, doing, where)
            if isinstance(failure, Expired):
                self._connection = None
            raise failure  # outside, without its cause: that may quote the request, and tokens with it

        first_failure = None

        def spent(state: RetryCallState) -> bool:
            nonlocal first_failure
            now = time.monotonic()
            first_failure = first_failure or now
            return now - first_failure + state.upcoming_sleep > self._give_up_after / 2  # tries take the other half

        retry = retry_if_exception_type(Transient)
        wait = wait_random_exponential(multiplier=0.1, max=5)
        try:
            return Retrying(retry=retry, wait=wait, stop=spent, reraise=True)(attempt)
        except Transient as error:
            raise StoreError(
                f"cannot {doing} {where}: {error}, again and again; check that server and the way to it."
                " What was stored before is untouched"
            ) from None

    def _connect(self, where: str) -> _Connection:
        """With credentials and settings as the environment, ~/.aws or the machine's role give them now."""
        try:
            session = boto3.Session()
            if session.get_credentials() is None:
                raise StoreError(
                    f"no AWS credentials for {where}: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
                )
        except (ProfileNotFound, PartialCredentialsError) as error:
            raise StoreError(f"no AWS credentials for {where}: {error}; correct the AWS settings") from None
        region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        patience = min(PATIENCE, self._give_up_after / 2)
        config = Config(connect_timeout=5, read_timeout=patience, retries={"total_max_attempts": 1})
        api = session.client("s3", region_name=region, config=config)
        endpoint: str = api.meta.endpoint_url
        objects = Objects(
            self._bucket,
            endpoint=endpoint,
            region=region,
            checksum_algorithm="CRC64NVME",
            disable_bulk_delete=True,
            credential_provider=Boto3CredentialProvider(session, ttl=timedelta(minutes=5)),
            **self._encryption,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=5),
                "read_timeout": timedelta(seconds=patience),
                "timeout": _NOT_AT_ONCE,
            },
            retry_config={
                "max_retries": 100,
                "retry_timeout": timedelta(seconds=self._give_up_after / 4),
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=3), "base": 2},
            },
        )
        return _Connection(objects, api)


class _Pace:
    """So many bytes per second, whichever threads send them."""

    def __init__(self, bandwidth: int) -> None:
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free_at = 0.0

    def through(self, view: memoryview, size: int) -> Iterator[memoryview]:
        """`view` in slices of `size` bytes, each when it is its turn."""
        for start in range(0, max(len(view), 1), size):
            piece = view[start : start + size]
            with self._lock:
                begin = max(time.monotonic(), self._free_at)
                self._free_at = begin + len(piece) / self._bandwidth
            time.sleep(max(0.0, begin - time.monotonic()))
            yield piece
