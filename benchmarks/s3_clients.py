"""S3 clients side by side on one server: wall time and the client's own CPU time, up and down.

    python -m benchmarks.s3_clients [MIB]

The least that a client can do is "sockets": presigned requests on 8 plain connections, no checksums. Absolute times say
little (the server runs on the same cores), so each is also given as a ratio within the run.
"""

import http.client
import io
import json
import os
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import boto3
import obstore
import s3fs
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from obstore.store import S3Store as Objects

from checkpointing.store import open_store
from harness.weed import ACCESS_KEY, BUCKET, SECRET_KEY, Weed

THREADS = 8
PART = 16 << 20
REPEATS = 3


class Client(Protocol):
    """Each verb takes all values of a case at once, as each client has its own way to do several."""

    def up(self, values: dict[str, memoryview]) -> None: ...
    def down(self, keys: list[str], size: int) -> list[bytes]: ...


def in_threads[A, R](do: Callable[[A], R], of: list[A]) -> list[R]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(do, of))


class Sockets:
    """One request per part, on connections that stay open."""

    def __init__(self, server: Weed) -> None:
        plain = Config(signature_version="s3v4", request_checksum_calculation="when_required")
        self._api = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1", config=plain)
        self._host = server.endpoint.removeprefix("http://")

    def up(self, values: dict[str, memoryview]) -> None:
        if all(len(value) <= PART for value in values.values()):
            self._all([("PUT", self._sign("put_object", Key=key), value, {}) for key, value in values.items()])
            return
        for key, value in values.items():
            upload = self._api.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
            starts = range(0, len(value), PART)
            urls = [self._sign("upload_part", Key=key, UploadId=upload, PartNumber=1 + at // PART) for at in starts]
            answers = self._all([("PUT", url, value[at : at + PART], {}) for at, url in zip(starts, urls, strict=True)])
            parts = [{"PartNumber": number, "ETag": tag} for number, (tag, _) in enumerate(answers, 1)]
            self._api.complete_multipart_upload(
                Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
            )

    def down(self, keys: list[str], size: int) -> list[bytes]:
        ranges = [(at, min(at + PART, size) - 1) for at in range(0, size, PART)]
        urls = [(self._sign("get_object", Key=key), first, last) for key in keys for first, last in ranges]
        answers = self._all([("GET", url, None, {"Range": f"bytes={first}-{last}"}) for url, first, last in urls])
        bodies = [body for _, body in answers]
        step = len(ranges)
        return [b"".join(bodies[at : at + step]) if step > 1 else bodies[at] for at in range(0, len(bodies), step)]

    def _sign(self, operation: str, **parameters: Any) -> str:
        url: str = self._api.generate_presigned_url(operation, Params={"Bucket": BUCKET, **parameters})
        return url.partition(self._host)[2]

    def _all(self, requests: list[tuple[str, str, Any, dict[str, str]]]) -> list[tuple[str, bytes]]:
        def work(mine: list[tuple[str, str, Any, dict[str, str]]]) -> list[tuple[str, bytes]]:
            connection = http.client.HTTPConnection(self._host)
            answers = []
            for method, url, body, headers in mine:
                connection.request(method, url, body, headers)
                answer = connection.getresponse()
                answers.append((answer.headers["ETag"], answer.read()))
                assert answer.status in (200, 206), answer.status
            connection.close()
            return answers

        shares = in_threads(work, [requests[first::THREADS] for first in range(THREADS)])
        return [shares[index % THREADS][index // THREADS] for index in range(len(requests))]


class Ours:
    def __init__(self, server: Weed) -> None:
        self._store = open_store(f"s3://{BUCKET}")

    def up(self, values: dict[str, memoryview]) -> None:
        in_threads(lambda key: self._store.put(key, values[key]), list(values))

    def down(self, keys: list[str], size: int) -> list[bytes]:
        return in_threads(self._store.get, keys)


class Obstore:
    def __init__(self, server: Weed, **config: Any) -> None:
        self._objects = Objects(
            BUCKET,
            endpoint=server.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True, "timeout": "600s"},
            **config,
        )

    def up(self, values: dict[str, memoryview]) -> None:
        in_threads(lambda key: obstore.put(self._objects, key, values[key], chunk_size=PART), list(values))

    def down(self, keys: list[str], size: int) -> list[bytes]:
        return in_threads(lambda key: bytes(obstore.get(self._objects, key).bytes()), keys)


class S3fs:
    def __init__(self, server: Weed) -> None:
        self._fs = s3fs.S3FileSystem(
            key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=server.endpoint, skip_instance_cache=True
        )

    def up(self, values: dict[str, memoryview]) -> None:
        self._fs.pipe({f"{BUCKET}/{key}": bytes(value) for key, value in values.items()})

    def down(self, keys: list[str], size: int) -> list[bytes]:
        paths = [f"{BUCKET}/{key}" for key in keys]
        if len(paths) == 1:
            return [self._fs.cat_file(paths[0])]
        found = self._fs.cat(paths)
        return [found[path] for path in paths]


class Boto3:
    def __init__(self, server: Weed) -> None:
        self._api = server.client()
        self._config = TransferConfig(
            preferred_transfer_client="classic", multipart_chunksize=PART, max_concurrency=THREADS
        )

    def up(self, values: dict[str, memoryview]) -> None:
        def one(key: str) -> None:
            self._api.upload_fileobj(io.BytesIO(values[key]), BUCKET, key, Config=self._config)

        in_threads(one, list(values))

    def down(self, keys: list[str], size: int) -> list[bytes]:
        def one(key: str) -> bytes:
            into = io.BytesIO()
            self._api.download_fileobj(BUCKET, key, into, Config=self._config)
            return into.getvalue()

        return in_threads(one, keys)


CLIENTS: dict[str, Callable[[Weed], Client]] = {
    "sockets": Sockets,
    "S3Store": Ours,
    "obstore, CRC64NVME": lambda server: Obstore(server, checksum_algorithm="CRC64NVME"),
    "obstore, no checksum": Obstore,
    "s3fs": S3fs,
    "boto3": Boto3,
}
WALL_BASE, CPU_BASE = "sockets", "obstore, CRC64NVME"


def measure(size: int) -> list[dict[str, Any]]:
    """Move `size` bytes, as objects of 16 MiB and as one, by each client in turn, `REPEATS` times.

    One row per client, case and direction: medians `wall_s` and `cpu_s` (of this process), and their ratios
    `wall_ratio` to plain sockets and `cpu_ratio` to obstore with the same checksum.
    """
    data = memoryview(os.urandom(size))
    cases = {
        f"{size // PART} x 16 MiB": {f"many/{at // PART}": data[at : at + PART] for at in range(0, size, PART)},
        f"1 x {size >> 20} MiB": {"one": data},
    }
    samples: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for turn in range(REPEATS):
        with server() as weed:
            names = list(CLIENTS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                client = CLIENTS[name](weed)
                for case, values in cases.items():
                    _run(client, values, lambda *sample, of=(case, name): samples[*of, sample[0]].append(sample[1:]))
    rows: list[dict[str, Any]] = [
        {
            "case": case,
            "direction": direction,
            "client": name,
            "wall_s": statistics.median(wall for wall, _ in taken),
            "cpu_s": statistics.median(cpu for _, cpu in taken),
        }
        for (case, name, direction), taken in samples.items()
    ]
    for row in rows:
        like = {other["client"]: other for other in rows if all(other[k] == row[k] for k in ("case", "direction"))}
        row["wall_ratio"] = row["wall_s"] / like[WALL_BASE]["wall_s"]
        row["cpu_ratio"] = row["cpu_s"] / like[CPU_BASE]["cpu_s"]
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [f"| | client | wall s | / {WALL_BASE} | CPU s | / {CPU_BASE} |", "|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["case"], row["direction"], list(CLIENTS).index(row["client"]))):
        lines.append(
            f"| {row['case']} {row['direction']} | {row['client']} | {row['wall_s']:.2f} | {row['wall_ratio']:.2f}"
            f" | {row['cpu_s']:.2f} | {row['cpu_ratio']:.2f} |"
        )
    return "\n".join(lines)


@contextmanager
def server() -> Iterator[Weed]:
    """A fresh one, which the environment names: SeaweedFS keeps what is overwritten until it finds time."""
    weed = Weed()
    settings = {"AWS_ENDPOINT_URL": weed.endpoint, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    try:
        weed.start()
        with patch.dict(os.environ, settings):
            yield weed
    finally:
        weed.stop()


def _run(client: Client, values: dict[str, memoryview], note: Callable[[str, float, float], None]) -> None:
    keys, size = list(values), len(next(iter(values.values())))
    for key in keys:  # connections, credentials and lazy imports are nobody's speed
        client.up({f"warm/{key}": memoryview(b"warm")})
    _timed("up", note, lambda: client.up(values))
    found = _timed("down", note, lambda: client.down(keys, size))
    assert found == list(values.values()), client


def _timed[R](direction: str, note: Callable[[str, float, float], None], do: Callable[[], R]) -> R:
    cpu, wall = _cpu(), time.perf_counter()
    result = do()
    note(direction, time.perf_counter() - wall, _cpu() - cpu)
    return result


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    measured = measure(int(sys.argv[1] if len(sys.argv) > 1 else 256) << 20)
    print(markdown(measured))
    print(json.dumps(measured))
