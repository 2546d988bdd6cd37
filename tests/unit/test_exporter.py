"""Who may ask for a run's metrics, where, and that the run does not feel it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from checkpointing.errors import ConfigError
from checkpointing.events import AttemptEnded, RunFinished, RunStopped
from harness import exporter, supervisor
from harness.baselines import determined_by
from harness.config import Metrics, RunConfig, Supervision
from harness.engines import EnginePool
from harness.exporter import TOKEN, Endpoint, Exporter
from harness.processes import free_port
from harness.runs import is_recorded, leave_config
from harness.stopping import STOP_FILE, StopRequest
from tests.prometheus import exported

from .cli_samples import harness
from .fault_samples import until
from .journal_samples import STARTED, Told, begun, done
from .toy import train_a_number

SECRET = "not-for-everybody"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.delenv(TOKEN, raising=False)
    told = Told(tmp_path / "a-run", monkeypatch)
    told.say(1, STARTED, begun(), done(1))
    return told


@contextmanager
def listening(run: Told, address: str = "127.0.0.1") -> Iterator[tuple[Endpoint, str]]:
    with Endpoint(run.directory, Metrics(address=address)) as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever, args=(0.01,))
        thread.start()
        host = f"[{address}]" if ":" in address else "127.0.0.1"
        try:
            yield endpoint, f"http://{host}:{endpoint.server_address[1]}/metrics"
        finally:
            endpoint.shutdown()
            thread.join()


def ask(url: str, token: str | None = None) -> httpx.Response:
    return httpx.get(url, headers={"Authorization": f"Bearer {token}"} if token else {})


def test_whoever_is_on_this_machine_may_ask(run: Told) -> None:
    with listening(run) as (endpoint, url):
        seen = ask(url)
        assert seen.status_code == 200 and 'harness_step{run="a-run"} 1.0' in seen.text
        assert seen.headers["content-type"].startswith("text/plain; version=")
        first = endpoint.scraped
        assert first and ask(url.removesuffix("metrics")).status_code == 404
        assert endpoint.scraped == first


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7", "node-1.example"])
def test_nobody_else_may_without_a_token(run: Told, address: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics.address: {address} can be reached from elsewhere: set {TOKEN}"):
        Endpoint(run.directory, Metrics(address=address))
    told = harness("metrics", run.directory, "--address", address)
    assert told.code == ConfigError.exit_code and len(told.err.splitlines()) == 1


@pytest.mark.parametrize("address", ["0.0.0.0", "::1"])
def test_with_a_token_whoever_has_it(run: Told, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    with listening(run, address) as (endpoint, url):
        for wrong in (None, SECRET[:-1], SECRET + "x"):
            refused = ask(url, wrong)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert "harness_" not in refused.text and not endpoint.scraped
        seen = ask(url, SECRET)
        assert seen.status_code == 200 and endpoint.scraped and SECRET not in seen.text


def test_a_journal_that_can_t_be_read_is_an_answer_and_no_end(run: Told) -> None:
    broken = run.directory / "journal" / "supervisor-000001.jsonl"
    with listening(run) as (endpoint, url):
        broken.write_text("{}\n")
        refused = ask(url)
        assert refused.status_code == 500 and "supervisor-000001.jsonl:1: not a line of a journal" in refused.text
        assert not endpoint.scraped
        broken.unlink()
        assert ask(url).status_code == 200 and endpoint.scraped


def test_a_port_that_is_taken_and_a_directory_that_is_none(run: Told) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = harness("metrics", run.directory, "--port", port)
        assert told.code == ConfigError.exit_code
        assert f"can't listen on 127.0.0.1, port {port} (Address already in use)" in told.err
    told = harness("metrics", run.directory / "nowhere")
    assert told.code == ConfigError.exit_code and "no such directory" in told.err


@pytest.mark.parametrize("asked_before", [True, False])
def test_an_exporter_that_is_to_end_waits_to_be_asked_once_more_if_it_ever_was(run: Told, asked_before: bool) -> None:
    port = free_port()
    command = [sys.executable, "-m", "harness.cli", "metrics", str(run.directory), "--port", str(port)]
    with subprocess.Popen(command) as process:
        assert until(lambda: _listens(port))
        if asked_before:
            assert ask(f"http://127.0.0.1:{port}/metrics").status_code == 200
        process.send_signal(signal.SIGTERM)
        if asked_before:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)  # longer than it takes to hear that it is to end
            run.say(1, RunStopped(exit_code=23, reason="no further"), writer="supervisor")
            assert 'harness_exit_code{run="a-run"} 23.0' in ask(f"http://127.0.0.1:{port}/metrics").text
        assert process.wait() == 0


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_metrics_of_a_run_that_is_over_are_served_by_a_command(run: Told) -> None:
    run.say(1, done(2), RunFinished(planned_steps=2, last_step=2))
    run.say(1, AttemptEnded(exit_code=0, signal=None, reason="complete"), writer="supervisor")
    with exported(run.directory) as target:
        assert until(lambda: _text(target))
        assert 'harness_run_state{run="a-run",state="complete"} 1.0' in _text(target)


def _text(target: str) -> str:
    try:
        return ask(f"http://{target}/metrics").text
    except httpx.TransportError:
        return ""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of a run whose driver trains a number."""
    train_a_number(monkeypatch)
    monkeypatch.delenv(TOKEN, raising=False)
    limits = Supervision(backoff_seconds=0.0, disk_low_bytes=0)
    skyrl = {"trainer.max_training_steps": 3}
    where = Metrics(port=free_port())
    return RunConfig(run_dir=tmp_path / "run", device="cpu", supervision=limits, metrics=where, skyrl=skyrl)


def supervise(config: RunConfig, watch: Callable[[], None] = lambda: None) -> None:
    supervisor.supervise(config, EnginePool(config, config.run_dir / "logs"), watch=watch)


def assert_soon(look: Callable[[], bool]) -> None:
    assert until(look)


def test_a_supervised_run_is_served_until_its_end_is_known(config: RunConfig) -> None:
    """The last look is made after the supervisor has said its last word, and is what it waits for."""
    seen: list[str] = []

    def look() -> bool:
        seen.extend(filter(None, [_text(f"127.0.0.1:{config.metrics.port}")]))
        return bool(seen)

    # The run is so short that it would be over before anybody is there to be asked.
    training = threading.Thread(target=supervise, args=(config, lambda: assert_soon(look)))
    training.start()
    while training.is_alive():
        look()
    training.join()
    assert 'harness_run_state{run="run",state="complete"} 1.0' in seen[-1]
    assert 'harness_step{run="run"} 3.0' in seen[-1]
    assert not _listens(config.metrics.port)


def test_a_run_does_not_begin_where_its_metrics_can_t_be_served(config: RunConfig) -> None:
    with socket.create_server(("127.0.0.1", config.metrics.port)), pytest.raises(ConfigError, match="can't listen on"):
        supervise(config)
    public = config.model_copy(update={"metrics": Metrics(port=config.metrics.port, address="0.0.0.0")})
    with pytest.raises(ConfigError, match=TOKEN):
        supervise(public)
    assert not (config.run_dir / "journal").exists()


@contextmanager
def exporting(config: RunConfig) -> Iterator[tuple[Exporter, StopRequest]]:
    config.run_dir.mkdir(exist_ok=True)
    with StopRequest(config.run_dir, 60) as stop, Exporter(config, stop) as running:
        yield running, stop


def _pid(config: RunConfig) -> int:
    return int((config.run_dir / "logs" / "metrics.sessions").read_text().split('"session": ')[-1].split(",")[0])


def test_an_exporter_that_dies_is_started_again(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "PAUSE", 0.0)
    with exporting(config) as (running, _):
        first = _pid(config)
        os.kill(first, signal.SIGKILL)

        def again() -> bool:
            running.look()
            return _pid(config) != first

        assert until(again)
        assert until(lambda: _listens(config.metrics.port))
        second = _pid(config)
    assert not psutil.pid_exists(second)


def test_one_that_can_t_be_started_is_no_error_of_the_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "PAUSE", 0.0)

    refused: list[str] = []

    def refuse(*_: object) -> None:
        refused.append("no memory")
        raise OSError(refused[-1])

    def again() -> bool:
        running.look()
        return len(refused) > 1

    with exporting(config) as (running, _):
        os.kill(_pid(config), signal.SIGKILL)
        monkeypatch.setattr(exporter, "spawn", refuse)
        assert until(again)


def test_who_is_asked_to_stop_does_not_wait_for_a_last_look(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopRequest, "sleep", lambda self, seconds: pytest.fail("it waits"))
    with exporting(config):
        assert until(lambda: _text(f"127.0.0.1:{config.metrics.port}"))
        (config.run_dir / STOP_FILE).touch()
    assert not _listens(config.metrics.port)


def test_what_a_killed_supervisor_left_is_ended_and_the_port_taken_over(config: RunConfig) -> None:
    with exporting(config):
        first = _pid(config)
        assert until(lambda: _listens(config.metrics.port))
        with exporting(config):
            assert until(lambda: _listens(config.metrics.port))
            assert _pid(config) != first and not psutil.pid_exists(first)


def test_another_endpoint_is_no_other_run(config: RunConfig) -> None:
    config.run_dir.mkdir()
    leave_config(config.run_dir, config)
    without = config.model_copy(update={"metrics": Metrics()})
    assert is_recorded(without) and determined_by(without) == determined_by(config)
