"""Proxies in front of what a drill is to break: engines, and an object store that speaks plain HTTP."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from chaos import faults
from chaos.directory import PlanDirectory
from chaos.plan import PlannedFault
from chaos.process import ProcessId
from checkpointing.errors import HarnessError
from harness.engines import Engine, EnginePool
from harness.processes import reap, spawn

_START_SECONDS = 60.0
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class Proxy:
    """A `chaos.rules` process with `folder` for its files. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Proxy":
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "port").unlink(missing_ok=True)
        reap(self._ledger)  # of a supervisor that was killed
        command = [sys.executable, "-m", "chaos.rules", str(self.folder.resolve())]
        self._process = spawn(command, os.environ, self.folder / "log", self._ledger)
        deadline = time.monotonic() + _START_SECONDS
        while not (self.folder / "port").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise HarnessError(f"a proxy did not start, see {self.folder / 'log'}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        reap(self._ledger)
        if self._process is not None:
            self._process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{(self.folder / 'port').read_text()}"

    def point_at(self, url: str) -> None:
        """What is behind it from the next request on."""
        aside = self.folder / "upstream.tmp"
        aside.write_text(urlsplit(url).netloc)
        aside.replace(self.folder / "upstream")

    @property
    def _ledger(self) -> Path:
        return self.folder / "sessions"


@dataclass
class WatchedEngines(EnginePool):
    """The engines of another pool, known to a plan by name, some of them behind proxies: {"engine:0": its proxy}."""

    directory: PlanDirectory = field(kw_only=True)
    proxies: Mapping[str, Proxy] = field(kw_only=True)

    @property
    def urls(self) -> list[str]:
        self._announce()  # also those that ran before the plan was there
        return [self._seen_through_proxy(index, engine.url) for index, engine in enumerate(self.engines)]

    def _seen_through_proxy(self, index: int, url: str) -> str:
        proxy = self.proxies.get(f"engine:{index}")
        if proxy is None:
            return url
        proxy.point_at(url)
        return proxy.url

    def start_missing(self) -> None:
        super().start_missing()
        self._announce()

    def restart(self, engine: Engine) -> None:
        super().restart(engine)
        self._announce()

    def _announce(self) -> None:
        for index, engine in enumerate(self.engines):
            with suppress(ProcessLookupError):
                self.directory.announce(f"engine:{index}", ProcessId.of(engine.process.pid))


def behind_proxies(planned: tuple[PlannedFault, ...]) -> list[str]:
    """The targets that need a proxy."""
    return sorted({one.target for one in planned if faults.find(one.fault).KIND in ("engine", "remote")})


def s3_endpoint() -> str:
    """Where S3 is. Raises Unavailable: no proxy can stand in front of that."""
    endpoint = next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "")
    if not endpoint.startswith("http://"):
        raise faults.Unavailable("faults of S3 need a server that speaks plain HTTP, named http:// in AWS_ENDPOINT_URL")
    return endpoint


@contextmanager
def in_front_of_s3(proxy: Proxy) -> Iterator[None]:
    """What this process and its children ask of S3 goes through `proxy`. Raises Unavailable."""
    proxy.point_at(s3_endpoint())
    before = {name: os.environ[name] for name in _ENDPOINTS if name in os.environ}
    os.environ.update(dict.fromkeys(before, proxy.url))
    try:
        yield
    finally:
        os.environ.update(before)
