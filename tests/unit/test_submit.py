"""`harness submit` and a real Ray head with its job server, which asks for a token. Drivers are stand-ins."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from checkpointing.errors import ConfigError, Preempted
from checkpointing.events import AttemptStarted, RunFinished, RunStopped
from checkpointing.journal import read_journal
from harness.clusters import variables
from harness.config import RunConfig
from harness.processes import free_port
from harness.runs import recorded_run
from harness.submit import PLUGIN_PACKAGE, _next_submission, carried
from tests.heads import Head, until

from .cli_samples import Said, harness
from .fault_samples import Answers

TOKEN = "t0ken-of-the-cluster"
HARNESS = """#!{python}
# The real command and the real supervisor, whose drivers are stand-ins.
import os, sys
from harness import driver_process, supervisor
from harness.cli import main
from harness.processes import spawn

def start(config, urls, attempt, faults, unusable):
    command = [sys.executable, "-c", {driver!r}, str(config.run_dir), config.ray_address]
    return spawn(command, os.environ, driver_process.log_path(config, attempt), driver_process.ledger(config))

supervisor.start_driver = start
main()
"""

DRIVER = """
# Saves a step, and another one when the file `go` is there, which is the last, or when it is asked to stop.
import os, signal, sys, threading
from pathlib import Path
from checkpointing.commit import commit, start_attempt
from checkpointing.events import AttemptStarted, RunFinished
from checkpointing.history import newest_restorable
from checkpointing.journal import Journal
from checkpointing.manifest import Manifest
from checkpointing.store import open_store
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
run, address = Path(sys.argv[1]), sys.argv[2]
store = open_store(f"file://{run / 'store'}")
found, _ = newest_restorable(store)
parent, step = (found[0], found[1].step) if found else (None, 0)
attempt = start_attempt(store, parent)
journal = Journal(run, "driver", attempt.attempt)
(run / "address").write_text(address)
journal.append(AttemptStarted(pid=os.getpid(), resumed_from=step or None, world_size=1))
def save():
    global step, parent
    step += 1
    parent = commit(store, attempt, Manifest(step=step, topology={}, entries={}, run={}), parent)
save()
(run / "saved").touch()
while not asked.wait(0.05) and not (run / "go").exists():
    pass
threading.Event().wait(4.0 if asked.is_set() else 0.0)  # longer than Ray waits unless it is told to
save()
if asked.is_set():
    sys.exit(75)
journal.append(RunFinished(planned_steps=step, last_step=step))
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
    command = folder / "bin" / "harness"
    command.parent.mkdir()
    command.write_text(HARNESS.format(python=sys.executable, driver=DRIVER))
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    env = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    made = Head(folder, env | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN})
    try:
        made.start()
        yield made
    finally:
        made.kill()


class Run:
    """A run config, and what became of it on the cluster."""

    def __init__(self, folder: Path, head: Head) -> None:
        self.directory, self.config = folder / "run.1", folder / "run.yaml"
        said = {
            "run_dir": str(self.directory),
            "device": "cpu",
            "skyrl": {"trainer": {"lr": 1e-05, "name": "it's $HOME"}},
        }
        self.config.write_text(yaml.safe_dump(said))
        self.reach(head)

    def reach(self, head: Head) -> None:
        self.url = head.url
        with variables({"RAY_API_SERVER_ADDRESS": self.url}):
            self.jobs = JobSubmissionClient(self.url, headers={"Authorization": f"Bearer {TOKEN}"})

    def submit(self) -> str:
        """Returns the submission's id."""
        said = harness("submit", self.config, "--address", self.url)
        assert said.code == 0, said.err
        return said.out.split()[1]

    def starts(self) -> list[int | None]:
        """For each attempt the step that it began at."""
        events = [record.event for record in read_journal(self.directory)]
        return [event.resumed_from for event in events if isinstance(event, AttemptStarted)]

    def until_started(self, attempts: int, job: str) -> None:
        until(lambda: len(self.starts()) == attempts, lambda: self.jobs.get_job_logs(job))

    def end(self, job: str) -> JobStatus:
        until(lambda: self.jobs.get_job_status(job).is_terminal(), lambda: self.jobs.get_job_logs(job))
        return self.jobs.get_job_status(job)


@pytest.fixture
def run(head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # of another cluster: --address is what counts
    made = Run(tmp_path, head)
    yield made
    made.directory.mkdir(exist_ok=True)
    (made.directory / "go").touch()


def one_error(said: Said, *parts: str) -> None:
    assert (said.code, len(said.err.splitlines())) == (ConfigError.exit_code, 1), said.err
    assert said.err.startswith("error: ") and all(part in said.err for part in parts), said.err


def test_a_run_outlives_who_submitted_it_and_is_not_begun_twice(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "harness.cli", "submit", str(run.config), "--address", run.url]
    env = os.environ | {"RAY_AUTH_MODE": "token"}
    client = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (client.returncode, client.stderr) == (0, ""), client.stderr
    job = client.stdout.split()[1]
    assert job.startswith("run-1-") and job.endswith("-1")
    assert f"ray job logs {job} --address {run.url} --follow" in client.stdout
    run.until_started(1, job)

    again = harness("submit", run.config, "--address", run.url)
    one_error(again, str(run.directory), f"at work on it, as {job}; ")
    with monkeypatch.context() as late:  # who has looked before the other one submitted
        late.setattr(JobSubmissionClient, "list_jobs", lambda self: [])
        one_error(harness("submit", run.config, "--address", run.url), f"at work on it, as {job}")

    assert "state: running" in harness("status", run.directory).out
    (run.directory / "go").touch()
    assert run.end(job) == JobStatus.SUCCEEDED, run.jobs.get_job_logs(job)
    followed = harness("events", run.directory, "--follow").out
    assert "attempt.started" in followed and "run.finished" in followed
    assert run.starts() == [None]
    assert isinstance(read_journal(run.directory)[-2].event, RunFinished)
    ran = recorded_run(run.directory).config
    assert ran.skyrl == {"trainer": {"lr": 1e-05, "name": "it's $HOME"}}, "not a digit and no type of it was changed"
    assert (run.directory / "address").read_text() == "auto", "the cluster that it was submitted to"


def test_a_job_that_is_stopped_by_ray_or_by_us_saves_and_the_run_goes_on_with_the_next(run: Run) -> None:
    def stopped() -> bool:
        last = read_journal(run.directory)[-1].event
        return isinstance(last, RunStopped) and last.exit_code == Preempted.exit_code

    first = run.submit()
    run.until_started(1, first)
    run.jobs.stop_job(first)
    assert run.end(first) == JobStatus.STOPPED and stopped()

    second = run.submit()
    assert second == first.removesuffix("-1") + "-2"
    run.until_started(2, second)
    assert harness("stop", run.directory).code == 0
    assert run.end(second) == JobStatus.FAILED and stopped()
    assert run.starts() == [None, 2]
    assert "newest durable: step 4" in harness("checkpoints", run.directory).out


def test_the_cluster_is_lost_and_the_run_submitted_again(run: Run, head: Head) -> None:
    first = run.submit()
    until((run.directory / "saved").exists, lambda: run.jobs.get_job_logs(first))
    head.kill()
    head.start()
    run.reach(head)
    assert run.submit() == first, "the new cluster has not heard of it"
    run.until_started(2, first)
    (run.directory / "go").touch()
    assert run.end(first) == JobStatus.SUCCEEDED, run.jobs.get_job_logs(first)
    assert run.starts() == [None, 1]


@pytest.mark.parametrize(("token", "said"), [(None, "Missing authentication token"), ("wrong", "Invalid")])
def test_without_the_token(run: Run, monkeypatch: pytest.MonkeyPatch, token: str | None, said: str) -> None:
    before = len(run.jobs.list_jobs())
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    if token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    one_error(harness("submit", run.config, "--address", run.url), run.url, said, "RAY_AUTH_TOKEN")
    assert len(run.jobs.list_jobs()) == before


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "run"), "skyrl": {}}))
    return path


def test_a_token_is_needed_and_there_is_none(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness.cli", "submit", str(config), "--address", "http://127.0.0.1:1"]
    env = os.environ | {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    one_error(
        Said(said.returncode, said.stdout, said.stderr), "couldn't find an authentication token; set RAY_AUTH_TOKEN"
    )


def test_nothing_listens_there(config: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    one_error(harness("submit", config, "--address", url), f"{url}: can't be reached")


def test_what_listens_there_is_no_job_server(config: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answers,), {"heard": []}))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        one_error(harness("submit", config, "--address", url), f"{url}: nothing was submitted: ")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("address", ["auto", "head:6379", "ray://head:10001", "os://head", "http:/head"])
def test_other_addresses(config: Path, address: str) -> None:
    one_error(harness("submit", config, "--address", address), address, "http://HOST:8265")


def test_sagemaker_without_the_toolkit(config: Path) -> None:
    address = "sagemaker_ray://cluster/namespace"
    one_error(harness("submit", config, "--address", address), address, f"pip install {PLUGIN_PACKAGE}")


def test_an_address_of_the_toolkit_is_what_the_toolkit_makes_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sagemaker_ray.py").write_text(
        "from ray.dashboard.modules import dashboard_sdk\n"
        "def get_job_submission_client_cluster_info(address, **kwargs):\n"
        "    cluster, _, port = address.partition('/')\n"
        "    if cluster != 'mine':\n"
        "        raise Exception('not authorized for ' + cluster)\n"
        "    return dashboard_sdk.get_job_submission_client_cluster_info(f'127.0.0.1:{port}', **kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    port = run.url.rpartition(":")[2]
    one_error(harness("submit", run.config, "--address", f"sagemaker_ray://other/{port}"), "not authorized for other")
    run.url = f"sagemaker_ray://mine/{port}"
    job = run.submit()
    run.jobs.stop_job(job)
    assert run.end(job) == JobStatus.STOPPED
    monkeypatch.delitem(sys.modules, "sagemaker_ray")


def test_a_config_that_can_t_be_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(run_dir: str, **trainer: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            carried(RunConfig(run_dir=Path(run_dir), skyrl={"trainer": trainer}), tmp_path / "run.yaml")
        return str(refused.value)

    assert "run_dir: runs/a is relative" in refusal("runs/a")
    monkeypatch.setenv("TRACKER_PASSWORD", "hunter2-hunter2")
    for where in (refusal("/runs/a", note="by hunter2-hunter2"), refusal("/runs/a", wandb_api_key="0123456789abcdef")):
        assert "skyrl.trainer." in where and "secret" in where
        assert "hunter2" not in where and "0123456789abcdef" not in where


def test_a_config_is_carried_as_it_was_said(tmp_path: Path) -> None:
    config = RunConfig(run_dir=Path("/runs/a"), ray_address="local", skyrl={"a": {"b": [1e-05, None, "1e-05", "x\ny"]}})
    text = carried(config, tmp_path / "run.yaml")
    assert RunConfig.model_validate(yaml.safe_load(text)) == config.model_copy(update={"ray_address": "auto"})
    assert "supervision" not in text, "what was left to the harness is decided by the one on the cluster"


def test_ids(tmp_path: Path) -> None:
    def submitted(name: str, status: JobStatus = JobStatus.FAILED) -> JobDetails:
        return JobDetails(type="SUBMISSION", submission_id=name, status=status, entrypoint="")

    driver = JobDetails(type="DRIVER", status=JobStatus.RUNNING, entrypoint="")
    first = _next_submission(Path("/runs/a b"), [driver], "")
    name = first.removesuffix("-1")
    assert name.startswith("a-b-") and first == _next_submission(Path("/runs/../runs/a b/"), [], "")
    earlier = [submitted(f"{name}-{number}") for number in (9, 10, 2)]
    assert _next_submission(Path("/runs/a b"), earlier, "") == f"{name}-11"
    others = [submitted(f"{name}-x", JobStatus.RUNNING), submitted(f"{name}0-12", JobStatus.RUNNING)]
    assert _next_submission(Path("/runs/a b"), others, "") == first
    assert _next_submission(Path("/elsewhere/a b"), earlier, "") not in (f"{name}-11", first)
    with pytest.raises(ConfigError, match=rf"{name}-3; "):
        _next_submission(Path("/runs/a b"), [*earlier, submitted(f"{name}-3", JobStatus.PENDING)], "")
