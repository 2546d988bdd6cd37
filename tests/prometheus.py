"""A real Prometheus that scrapes real endpoints, and what it is to be asked: Debian's package `prometheus`."""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from harness.processes import free_port

CONFIGS = Path(__file__).parents[1] / "configs"
ALERTS = CONFIGS / "prometheus" / "alerts.yaml"
DASHBOARD = CONFIGS / "grafana" / "dashboard.json"


def has_prometheus() -> bool:
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


needs_prometheus = pytest.mark.skipif(
    not has_prometheus(),
    reason="needs Prometheus: apt-get install --no-install-recommends prometheus",
)

Series = dict[str, Any]
"""{"metric": {label: value}, "value": [time, text]}"""


def _is_number(series: Series) -> bool:
    return math.isfinite(float(series["value"][1]))


class Prometheus:
    """Asks each of `targets` (host:port) every five seconds, which a busy machine needs.

    `token`: the bearer token that it sends.
    """

    def __init__(self, folder: Path, targets: list[str], token: str | None = None) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        job: dict[str, Any] = {"job_name": "harness", "static_configs": [{"targets": targets}]}
        if token is not None:
            job["authorization"] = {"credentials": token}
        timing = {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"}
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump({"global": timing, "rule_files": [str(ALERTS)], "scrape_configs": [job]}))
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'series'}"]
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            listen = f"--web.listen-address={self._url.removeprefix('http://')}"
            self._process = subprocess.Popen([*command, listen], stdout=log, stderr=log)

    def __enter__(self) -> "Prometheus":
        self._wait(self._is_ready, 300.0, "it does not get ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, expression: str) -> list[Series]:
        """Instant query. Raises AssertionError: it is no PromQL."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": expression}, timeout=60)
        assert answer.status_code == 200, (expression, answer.text)
        found: list[Series] = answer.json()["data"]["result"]
        return found

    def until(self, expression: str, seconds: float = 300.0) -> list[Series]:
        """What `expression` gives as soon as it gives something."""
        return self._wait(lambda: self.ask(expression), seconds, f"nothing for {expression}")

    def without_data(self, queries: Iterable[str]) -> list[str]:
        """Those of `queries` that gave no number in the last half hour; whoever was asked may be gone by now."""
        time.sleep(2)  # the steps of a subquery are whole seconds: it does not see what has only just come
        return [query for query in queries if not any(map(_is_number, self.ask(f"last_over_time(({query})[30m:1s])")))]

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _wait[T](self, look: Callable[[], T], seconds: float, otherwise: str) -> T:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            if found := look():
                return found
            time.sleep(0.05)
        raise AssertionError(f"{otherwise}; its log ends: {self._log.read_text()[-2000:]}")


@contextmanager
def exported(run_dir: Path) -> Iterator[str]:
    """`harness metrics` of a run; where it listens, as a target."""
    port = free_port()
    command = [sys.executable, "-m", "harness.cli", "metrics", str(run_dir), "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def dashboard_queries() -> list[str]:
    """As Grafana sends them when all runs are chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"].replace("$run", ".*") for panel in panels for target in panel.get("targets", [])]
    assert queries
    return queries


def alert_queries() -> dict[str, str]:
    """{alert: its expression}"""
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\bharness_\w+", query))


NEVER = {"harness_straggler_timestamp_seconds", "harness_verdict", "harness_exit_code"}
"""What does not happen in every run, or not before its supervisor is done."""


@contextmanager
def every_query_has_data(port: int | None, folder: Path) -> Iterator[None]:
    """A real Prometheus, where there is one, scrapes the run inside the block: no panel of the dashboard is empty."""
    if not has_prometheus():
        yield
        return
    with Prometheus(folder, [f"127.0.0.1:{port}"]) as prometheus:
        yield
        empty = prometheus.without_data(dashboard_queries())
    assert [query for query in empty if not metrics_in(query) & NEVER] == []
