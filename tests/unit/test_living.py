"""`harness status`, `runs`, `events`, `stop` and `resume`, on runs whose drivers are made up."""

import io
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from checkpointing.errors import ConfigError
from checkpointing.events import (
    AttemptEnded,
    Evaluated,
    RunFinished,
    RunStopped,
)
from checkpointing.progress import ProgressFile, progress_path
from checkpointing.store import open_store
from harness import living
from harness.config import RunConfig, Supervision
from harness.runs import leave_config
from harness.status import RunView
from harness.stopping import STOP_FILE, StopRequest

from .checkpoint_samples import blob_keys, train
from .cli_samples import harness
from .journal_samples import LOST, STARTED, Told, begun, copied, done, saved

STOPPED = RunStopped(exit_code=75, reason="stopped as asked")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path / "runs" / "a [run]", monkeypatch)


def test_status_of_a_run_at_work(run: Told) -> None:
    run.say(1, STARTED, begun(), done(1), saved(1), copied(1), done(2), done(3, 0.5), saved(3))
    ProgressFile(progress_path(run.directory, 1)).hear("forward.begin", {"step": 4})
    seen = run.status()
    assert (seen["state"], seen["phase"], seen["step"], seen["planned"], seen["attempts"]) == (
        "running", "forward", 3, 100, 1,
    )  # fmt: skip
    assert (seen["newest_local"], seen["newest_durable"], seen["reward"]) == (3, 1, 0.5)
    assert seen["seconds_per_step"] == 20.0  # steps 1 to 3 are 40 seconds apart
    assert seen["expected_end"] == 1_000_070.0 + 97 * 20.0
    assert (seen["last_sign"], seen["last_failure"]) == (1_000_080.0, None)


def test_status_after_a_failure_and_a_fall_back(run: Told) -> None:
    run.say(1, STARTED, begun(), done(1), saved(1), copied(1), done(2), saved(2), copied(2), done(3), saved(3))
    run.say(1, LOST, writer="supervisor")
    run.say(2, begun(resumed_from=1))
    seen = run.status()
    assert (seen["attempts"], seen["newest_local"], seen["newest_durable"]) == (2, 1, 1)
    assert seen["expected_end"] is None, "nothing is known yet about the pace of this attempt"
    failure = seen["last_failure"]
    assert (failure["attempt"], failure["step"], failure["phase"]) == (1, 4, "train")
    said = harness("status", run.directory)
    assert "last failure: attempt 1 in train of step 4, 10 s ago: policy rank 1 died" in said.out


def test_status_of_a_run_that_stopped_went_on_and_is_complete(run: Told) -> None:
    run.say(1, STARTED, begun(), done(1), saved(1))
    run.say(1, AttemptEnded(exit_code=75, signal=None, reason="asked"), STOPPED, writer="supervisor")
    seen = run.status()
    assert (seen["state"], seen["stopped_because"], seen["last_failure"]) == ("stopped", "stopped as asked", None)
    assert seen["expected_end"] is None and seen["phase"] is None
    run.say(2, begun(resumed_from=1))
    assert run.status()["state"] == "running"
    run.say(2, done(100), RunFinished(planned_steps=100, last_step=100))
    assert (run.status()["state"], run.status()["step"]) == ("complete", 100)


def test_a_view_reads_only_what_is_new(run: Told) -> None:
    run.say(1, STARTED, begun(), done(1))
    view = RunView(str(run.directory))
    assert view.look().step == 1
    run.say(1, done(2))
    assert view.look().step == 2


def test_status_of_nothing(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere"):
        told = harness("status", where)
        assert told.code == ConfigError.exit_code and len(told.err.splitlines()) == 1


def test_status_of_a_store_that_is_all_one_can_reach(s3_url: str) -> None:
    assert harness("status", s3_url).code == ConfigError.exit_code, "nothing there"
    store = open_store(s3_url)
    _, [third] = train(store, None, 3)
    _, [fourth] = train(store, third, 4)
    seen = json.loads(harness("status", s3_url, "--json").out)
    assert (seen["state"], seen["step"], seen["newest_durable"], seen["attempts"]) == ("unknown", 4, 4, 2)
    store.delete(blob_keys(store, fourth)[0])
    said = harness("status", s3_url).out
    assert "state: unknown" in said and "newest checkpoint: local -, durable 3" in said, said


def test_runs(run: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Told(tmp_path / "runs" / "group" / "b", monkeypatch)
    run.say(1, STARTED, begun(), done(1), saved(1))
    other.say(1, STARTED, begun(), done(7), RunFinished(planned_steps=7, last_step=7))
    seen = json.loads(harness("runs", tmp_path / "runs", "--json").out)
    assert [(Path(one["run"]).name, one["state"], one["step"]) for one in seen] == [
        ("a [run]", "running", 1),
        ("b", "complete", 7),
    ]
    assert "a [run]" in harness("runs", tmp_path / "runs").out
    assert harness("runs", run.directory / "journal").code == ConfigError.exit_code


def test_events(run: Told) -> None:
    run.say(1, STARTED, begun(), done(1), Evaluated(step=1, metrics={"x": float("nan")}))
    run.say(1, LOST, writer="supervisor")
    lines = harness("events", run.directory).out.splitlines()
    assert [line.split()[5] for line in lines[:5]] == [
        "run.started", "attempt.started", "step.done", "evaluated", "attempt.ended",
    ]  # fmt: skip
    assert "step=1 epoch=0 seconds=8" in lines[2]
    assert "reason=policy rank 1 died step=4 phase=train" in lines[4]
    assert lines[5] == "    out of [red]luck[/red]"
    as_json = [json.loads(line) for line in harness("events", run.directory, "--json").out.splitlines()]
    assert [one["seq"] for one in as_json] == [0, 1, 2, 3, 0]
    assert as_json[3]["metrics"] == {"x": "NaN"} and as_json[4]["writer"] == "supervisor"


def test_events_are_followed_until_the_run_ends(run: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    run.say(1, STARTED, begun())
    later: list[Callable[[], None]] = [
        lambda: run.say(1, done(1)),
        lambda: run.say(1, LOST, STOPPED, writer="supervisor"),
    ]
    monkeypatch.setattr("time.sleep", lambda seconds: later.pop(0)())
    lines = harness("events", run.directory, "--follow").out.splitlines()
    assert [line.split()[5] for line in lines if not line.startswith(" ")] == [
        "run.started", "attempt.started", "step.done", "attempt.ended", "run.stopped",
    ]  # fmt: skip


def test_events_of_a_complete_run_are_shown_and_not_waited_for(run: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    run.say(1, STARTED, begun(), done(1), RunFinished(planned_steps=1, last_step=1))
    run.say(1, AttemptEnded(exit_code=0, signal=None, reason="complete"), writer="supervisor")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("there is nothing to wait for"))
    lines = harness("events", run.directory, "--follow").out.splitlines()
    assert [line.split()[5] for line in lines][-2:] == ["run.finished", "attempt.ended"]


@pytest.fixture
def config(run: Told) -> RunConfig:
    made = RunConfig(run_dir=run.directory, device="cpu", supervision=Supervision(grace_seconds=5), skyrl={"a": 1})
    leave_config(run.directory, made)
    return made


def test_stop_waits_until_the_supervisor_is_gone(run: Told, config: RunConfig) -> None:
    run.say(1, STARTED, begun(), done(1), saved(1))
    said = io.StringIO()
    with StopRequest(run.directory, 5) as request:
        asking = threading.Thread(target=living.stop_run, args=(str(run.directory), Console(file=said, width=1000)))
        asking.start()
        while not request.asked:
            time.sleep(0.01)
        run.say(1, STOPPED, writer="supervisor")
        assert asking.is_alive()
    asking.join()
    assert said.getvalue().splitlines() == [
        f"{run.directory}: stopped; newest checkpoint: step 1",
        f"go on: harness resume {run.directory}",
    ]
    assert harness("stop", run.directory).out.strip() == f"{run.directory}: already stopped"


def test_stop_when_nobody_hears(run: Told, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run.say(1, STARTED, begun())
    monkeypatch.setattr(living, "HEARD_WITHIN", -5.0)
    told = harness("stop", run.directory)
    assert told.code == ConfigError.exit_code and "nothing has stopped within 0 s" in told.err
    assert not (run.directory / STOP_FILE).exists()


def test_resume_is_run_as_recorded(
    run: Told, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[RunConfig, Path]] = []
    monkeypatch.setattr(living, "start", lambda config, console: started.append((config, Path.cwd())))
    here = Path.cwd()
    moved = tmp_path / "moved"
    run.directory.rename(moved)
    try:
        assert harness("resume", os.path.relpath(moved)).code == 0
        assert started == [(config.model_copy(update={"run_dir": moved}), here)]
    finally:
        os.chdir(here)
    record = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(record | {"directory": str(tmp_path / "gone")}))
    told = harness("resume", moved)
    assert told.code == ConfigError.exit_code and "No such file" in told.err
    assert harness("resume", tmp_path).code == ConfigError.exit_code
