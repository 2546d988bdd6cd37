"""An object store behind a bad network: delays, errors, answers that are lost, requests that arrive late, outages.

It stands in for obstore and for boto3's client below the product's `S3Store`, whose own retries are what is tried.
"""

from collections.abc import Callable
from typing import Any

from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from checkpointing.stores.s3 import S3Store


class Objects:
    """One bucket. `point(name, seconds)` is called before and after each request, `changed(bucket, key)` after each
    effect, `looked(bucket, prefix)` at each listing."""

    def __init__(
        self,
        name: str,
        point: Callable[[str, float], None],
        changed: Callable[[str, str], None],
        looked: Callable[[str, str], None],
        latency: "Latency",
    ) -> None:
        self.name, self._point, self.changed, self._looked, self._latency = name, point, changed, looked, latency
        self.objects: dict[str, bytes] = {}
        self.down_until = self.denied_until = self.slow_until = 0.0
        self.errors = 0
        """So many of the next requests are answered by 503."""
        self.lost = self.lost_creates = 0
        """So many of the next changes, or creates, happen, and their answers do not arrive."""
        self.late: list[float] = []
        """Seconds after which the next writes happen, each long after its sender has given it up."""
        self.was_away = False
        """Some request was refused since this was last set back."""

    def request(self, verb: str, key: str, effect: Callable[[], Any], later: Callable[[float], None]) -> Any:
        now = self._latency.now
        self._point(f"s3.{verb}", self._latency(10.0 if self.slow_until > now else 0.05))
        now = self._latency.now
        if now < self.down_until:
            self.was_away = True
            self._latency.sleep(1.0)
            raise GenericError("Generic S3 error: error sending request: connection refused")
        if now < self.denied_until:
            self.was_away = True
            raise PermissionDeniedError("<Code>AccessDenied</Code><Message>no</Message>")
        if self.errors:
            self.errors -= 1
            self.was_away = True
            raise GenericError("Generic S3 error: <Code>SlowDown</Code><Message>reduce your rate</Message>")
        writes = verb in ("put", "create")
        if writes and self.late:
            later(self.late.pop())
            self._latency.sleep(5.0)
            raise GenericError("Generic S3 error: operation timed out")
        if verb == "list":
            self._looked(self.name, key)
        answer = effect()
        if verb in ("put", "create", "delete"):
            self.changed(self.name, key)
            if self.lost or (self.lost_creates and verb == "create"):
                self.lost, self.lost_creates = max(self.lost - 1, 0), max(self.lost_creates - 1, 0)
                raise GenericError("Generic S3 error: connection closed before message completed")
            self._point(f"s3.{verb}.done", 0.0)
        return answer


class Latency:
    """Seconds that a request takes, as chance has it; and the two things that it needs of the clock."""

    def __init__(self, clock: Any, rng: Any) -> None:
        self._clock, self._rng = clock, rng

    def __call__(self, most: float) -> float:
        return float(self._rng.uniform(0.2, 1.0) * most)

    @property
    def now(self) -> float:
        return float(self._clock.now)

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)


class Connection:
    """What `S3Store` takes for its client of one bucket, and for boto3's."""

    def __init__(self, bucket: Objects, after: Callable[[float, Callable[[], None]], None]) -> None:
        self.bucket, self._after = bucket, after
        self.objects = self.api = self

    def put(self, path: str, data: bytes, mode: str) -> None:
        def effect() -> None:
            if mode == "create" and path in self.bucket.objects:
                raise AlreadyExistsError(f"{path} already exists")
            self.bucket.objects[path] = data

        def arrive() -> None:
            if mode != "create" or path not in self.bucket.objects:
                self.bucket.objects[path] = data
                self.bucket.changed(self.bucket.name, path)

        verb = "create" if mode == "create" else "put"
        self.bucket.request(verb, path, effect, lambda seconds: self._after(seconds, arrive))

    def get(self, path: str) -> bytes:
        def effect() -> bytes:
            if path not in self.bucket.objects:
                raise FileNotFoundError(path)
            return self.bucket.objects[path]

        data: bytes = self.bucket.request("get", path, effect, lambda _: None)
        return data

    def delete(self, path: str) -> None:
        self.bucket.request("delete", path, lambda: self.bucket.objects.pop(path, None), lambda _: None)

    def get_paginator(self, _: str) -> Any:
        return self

    def paginate(self, Bucket: str, Prefix: str) -> Any:  # boto3's names
        def effect() -> list[dict[str, Any]]:
            objects = self.bucket.objects
            found = sorted(key for key in objects if key.startswith(Prefix))
            return [{"Key": key, "Size": len(objects[key])} for key in found]

        return [{"Contents": self.bucket.request("list", Prefix, effect, lambda _: None), "Uploads": []}]


class _Answer:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def bytes(self) -> bytes:
        return self._data


class Obstore:
    """What `S3Store` takes for the module `obstore`."""

    @staticmethod
    def put(to: Connection, path: str, data: Any, mode: str = "overwrite", **_: Any) -> None:
        to.put(path, bytes(data), mode)

    @staticmethod
    def get(at: Connection, path: str) -> _Answer:
        return _Answer(at.get(path))

    @staticmethod
    def delete(at: Connection, path: str) -> None:
        at.delete(path)


def connect(buckets: dict[str, Objects], after: Callable[[float, Callable[[], None]], None]) -> Callable[..., Any]:
    """What `S3Store._connect` is replaced with."""

    def _connect(store: S3Store, where: str) -> Connection:
        return Connection(buckets[store._bucket], after)

    return _connect
