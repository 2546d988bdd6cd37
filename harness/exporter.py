"""Serves what `metrics.py` knows of a run to Prometheus: `GET /metrics`, and nothing else.

A process of its own, which reads the run's directory and can't be felt by the run: a supervisor runs no threads (it
forks), and must not wait for whoever asks. It outlives every attempt. When the run has ended it waits to be asked once
more, so that how it ended is known.
"""

import hmac
import ipaddress
import os
import signal
import socket
import socketserver
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from checkpointing.errors import ConfigError
from checkpointing.redaction import redacted
from harness.config import Metrics, RunConfig
from harness.metrics import RunMetrics
from harness.processes import reap, spawn
from harness.stopping import StopRequest

TOKEN = "HARNESS_METRICS_TOKEN"
"""Environment variable. If it is set, whoever asks must send `Authorization: Bearer <its value>`."""

LAST_LOOK = 90.0
"""Seconds that an ended run waits to be asked once more, if it ever was: Prometheus asks each minute or more often."""

PAUSE = 60.0
"""Seconds between two starts of an exporter that ends by itself."""


class Endpoint(socketserver.TCPServer):
    """Listens at `where`. Answers one after the other: an answer takes milliseconds, and whoever is slow is left.

    Raises:
        ConfigError: it can't listen there; or others than this machine could ask, and no token keeps them from it.
    """

    allow_reuse_address = True
    timeout = 0.5  # seconds that `handle_request` waits for one

    def __init__(self, run_dir: Path, where: Metrics) -> None:
        self.scraped = 0.0
        """When it was last asked and could answer, in monotonic seconds; 0 if it never was."""
        self.token = os.environ.get(TOKEN, "")
        if not self.token and not _is_loopback(where.address):
            raise ConfigError(
                f"metrics.address: {where.address} can be reached from elsewhere: set {TOKEN} in the environment to "
                "what Prometheus is to send as its bearer token, or listen on 127.0.0.1"
            )
        self.registry = CollectorRegistry()
        self.registry.register(RunMetrics(run_dir))
        self.address_family = socket.AF_INET6 if ":" in where.address else socket.AF_INET
        try:
            super().__init__((where.address, where.port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"metrics: can't listen on {where.address}, port {where.port} ({error.strerror}); choose another "
                "metrics.port, or 0 for none"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked may have gone meanwhile: that is no error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a name: whoever answers to it is not for us to know


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint
    timeout = 5.0  # seconds for each read

    def do_GET(self) -> None:
        if not self._is_permitted():
            self._answer(401, b"wrong or no bearer token\n", "text/plain", ("WWW-Authenticate", "Bearer"))
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"see /metrics\n", "text/plain")
        else:
            try:
                asked, body = time.monotonic(), generate_latest(self.server.registry)
            except Exception as error:  # whatever it is: the next look may succeed, and Prometheus sees `up` 0
                self._answer(500, f"{redacted(str(error))}\n".encode(), "text/plain")
                return
            self.server.scraped = asked  # first: whoever has the answer knows it
            self._answer(200, body, CONTENT_TYPE_LATEST)

    def _is_permitted(self) -> bool:
        token, said = self.server.token, self.headers.get("Authorization", "")
        return not token or hmac.compare_digest(said.encode(), f"Bearer {token}".encode())

    def _answer(self, code: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would be a line for each scrape."""


def serve(run_dir: Path, where: Metrics) -> None:
    """Until SIGTERM, and then until asked once more, `LAST_LOOK` at most. Raises like `Endpoint`."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such directory; name a run directory")
    stopped: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(time.monotonic()))
    os.nice(10)  # training comes first
    with Endpoint(run_dir, where) as endpoint:
        while not stopped:
            endpoint.handle_request()
        while 0 < endpoint.scraped < stopped[0] and time.monotonic() < stopped[0] + LAST_LOOK:
            endpoint.handle_request()


class Exporter:
    """`serve` in a process of its own, around a supervised run. Nothing that becomes of it is an error of the run.

    Raises:
        ConfigError: as `Endpoint`, before anything is started.
    """

    def __init__(self, config: RunConfig, stop: StopRequest) -> None:
        self._config, self._stop = config, stop
        self._ledger = config.run_dir / "logs" / "metrics.sessions"
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def __enter__(self) -> "Exporter":
        if self._config.metrics.port:
            reap(self._ledger)  # what a supervisor that was killed has left behind
            Endpoint(self._config.run_dir, self._config.metrics).server_close()
            self._start()
        return self

    def look(self) -> None:
        """Start it again if it has ended."""
        if self._process and self._process.poll() is not None and time.monotonic() - self._started > PAUSE:
            self._start()

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        deadline = time.monotonic() + LAST_LOOK
        while self._process.poll() is None and not self._stop.asked and time.monotonic() < deadline:
            self._stop.sleep(0.1)
        reap(self._ledger)
        self._process.wait()

    def _start(self) -> None:
        where, log = self._config.metrics, self._config.run_dir / "logs" / "metrics.log"
        command = [sys.executable, "-m", "harness.cli", "metrics", str(self._config.run_dir.resolve())]
        command += ["--port", str(where.port), "--address", where.address]
        self._started = time.monotonic()
        with suppress(OSError):  # no memory, no space: the next look tries again
            self._process = spawn(command, os.environ, log, self._ledger)
