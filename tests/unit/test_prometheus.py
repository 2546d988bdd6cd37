"""The dashboard and the alerts as a real Prometheus sees them, which scrapes the real endpoints of three runs."""

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from checkpointing.errors import DivergenceError
from checkpointing.events import (
    AttemptEnded,
    CheckpointCommitted,
    Evaluated,
    MetricsLogged,
    RankStraggling,
    ReplicationFailed,
    RunStopped,
)
from checkpointing.progress import ProgressFile, progress_path
from configs.grafana.dashboard import build
from harness.config import Engines, RunConfig, Supervision
from harness.exporter import TOKEN
from harness.processes import free_port
from harness.runs import leave_config
from tests.prometheus import (
    ALERTS,
    CONFIGS,
    DASHBOARD,
    Prometheus,
    alert_queries,
    dashboard_queries,
    exported,
    needs_prometheus,
)

from .journal_samples import LOST, STARTED, Told, begun, copied, done, saved

DIVERGED = AttemptEnded(exit_code=DivergenceError.exit_code, signal=None, reason="step 2 came out differently")
SLOW = RankStraggling(step=1, role="policy", rank=1, node="n", seconds=4.0, median_of_others=1.0)
TIMES = {"timing/generate": 3.0, "timing/slowest_rank_ratio": 1.2}
HOUR = 3600.0


def test_the_committed_dashboard_is_what_its_source_builds() -> None:
    assert DASHBOARD.read_text() == build() + "\n", (
        "python -m configs.grafana.dashboard > configs/grafana/dashboard.json"
    )


@needs_prometheus
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", ALERTS),
        ("test", "rules", ALERTS.with_name("alerts_test.yaml")),
        ("check", "config", ALERTS.with_name("prometheus.yaml")),
    ],
)
def test_promtool_accepts_the_rules_and_their_tests(command: tuple[str | Path, ...]) -> None:
    checked = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_unit_tested_both_ways() -> None:
    cases = yaml.safe_load((CONFIGS / "prometheus" / "alerts_test.yaml").read_text())["tests"]
    told = [case for one in cases for case in one["alert_rule_test"]]
    for raised in (True, False):
        assert {case["alertname"] for case in told if bool(case.get("exp_alerts")) == raised} == alert_queries().keys()


class Runs:
    """`ill` has everything that there is an alert for, `well` has nothing, `over` gave up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = time.time()
        self.ill, self.well, self.over = (Told(folder / name / name, monkeypatch) for name in ("ill", "well", "over"))
        for run, disk in ((self.ill, 10**18), (self.well, 1)):
            limits = Supervision(disk_low_bytes=disk)
            config = RunConfig(run_dir=run.directory, engines=Engines(count=2), supervision=limits, skyrl={})
            leave_config(run.directory, config)
        self.ill.now, self.well.now, self.over.now = self._now - 3 * HOUR, self._now - 200, self._now - 200
        (self.ill.directory.parent / "verdict.json").write_text('{"judgement": {"outcome": "failed"}}')

    def begin(self) -> None:
        for run in (self.ill, self.well, self.over):
            run.say(1, STARTED, begun(), Evaluated(step=0, metrics={}, tokens_generated=10), done(1), saved(1))
            run.say(1, copied(1), writer="replicator")

    def go_on(self) -> None:
        self.well.say(1, done(2), large(2))
        self.well.say(1, copied(2).model_copy(update={"bytes_new": 5}), writer="replicator")
        self.well.say(1, MetricsLogged(step=2, metrics=TIMES))
        ProgressFile(progress_path(self.well.directory, 1)).hear("train.begin", {"step": 3})
        self.over.say(1, LOST, RunStopped(exit_code=23, reason="no further"), writer="supervisor")
        self.ill.say(1, done(2), large(2), MetricsLogged(step=2, metrics=TIMES))
        for attempt in (1, 2, 3, 4):
            self.ill.say(attempt, DIVERGED, writer="supervisor")
            self.ill.say(attempt + 1, begun(1), done(2))
        refused = ReplicationFailed(tier="file-2", reason="no space", newest_local=2, newest_there=1)
        self.ill.say(5, refused, writer="replicator")
        self.ill.now = self._now - 60
        self.ill.say(5, SLOW)


def large(step: int) -> CheckpointCommitted:
    return saved(step).model_copy(update={"bytes_new": 5, "stopped_seconds": 0.5})


@needs_prometheus
def test_every_query_of_dashboard_and_alerts_finds_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alert is raised by the run that it is for, and none by the one that is well."""
    monkeypatch.delenv(TOKEN, raising=False)
    runs = Runs(tmp_path, monkeypatch)
    runs.begin()
    nobody = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        ill, well = (stack.enter_context(exported(run.directory)) for run in (runs.ill, runs.well))
        ending = stack.enter_context(ExitStack())
        over = ending.enter_context(exported(runs.over.directory))
        prometheus = stack.enter_context(Prometheus(tmp_path, [ill, well, over, nobody]))
        prometheus.until("count(harness_step) == 3")
        runs.go_on()
        prometheus.until("harness_exit_code and on () harness_attempt == 5 and on () harness_phase == 1")
        assert prometheus.without_data(dashboard_queries()) == []
        assert prometheus.without_data(["harness_step > 1000"]), "as it says where there is none"
        ending.close()
        prometheus.until(f'up{{instance="{over}"}} == 0')
        raised = {alert: prometheus.ask(query) for alert, query in alert_queries().items()}
        by = {"HarnessGaveUp": set[str](), "HarnessGone": {nobody}}
        for alert, found in raised.items():
            assert {one["metric"]["instance"] for one in found} == by.get(alert, {ill}), alert
    assert {one["metric"].get("outcome") for one in raised["HarnessDivergence"]} == {None, "failed"}


@needs_prometheus
def test_prometheus_brings_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "not-for-everybody")
    run = Told(tmp_path / "a-run", monkeypatch)
    run.say(1, STARTED, begun(), done(1))
    with exported(run.directory) as target:
        with Prometheus(tmp_path, [target], token="not-for-everybody") as prometheus:
            prometheus.until("harness_step == 1")
        with Prometheus(tmp_path, [target], token="another") as prometheus:
            prometheus.until("up == 0")
