"""One curve per run in the metrics logger, whatever happened to the attempts that fed it."""

import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from checkpointing.errors import WorkerLost
from checkpointing.events import AttemptStarted, Evaluated, RunStarted
from checkpointing.journal import Journal, read_journal
from trainer.tracking import ContinuedTracking, MetricsAtStepEnd, end_orphaned_services, journaled
from trainer.wandb_files import transaction_log

from .logger_attempts import RUN_ID, Config, Trainer, loss, seconds

RAN_BY = {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 7: 2, 8: 2, 9: 3, 10: 4, 11: 4, 12: 4}
"""{step: the attempt that first finished it}. Step 6 was saved, and its attempt killed before it was logged."""

CURVES = {
    "eval": [(0, 0.0), (6, 6.0)],
    "loss": [(step, loss(step)) for step in range(1, 13)],
    "seconds": [(step, seconds(attempt, step)) for step, attempt in RAN_BY.items()],
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """{logger}/ is a run of four attempts, see `logger_attempts`."""
    directory = tmp_path_factory.mktemp("logged")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TENSORBOARD_"))}
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-m", "tests.unit.logger_attempts", str(directory)]
    done = subprocess.run(command, env=env | offline, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return directory


def test_tensorboard_holds_each_step_once_after_kills(logged: Path) -> None:
    reader = EventAccumulator(str(logged / "tensorboard/tensorboard"), {"scalars": 0}, purge_orphaned_data=False)
    reader.Reload()
    found = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    assert found == CURVES


def test_wandb_4482_offline_holds_each_step_once_after_kills(logged: Path) -> None:
    files = sorted(logged.glob("wandb/wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 4
    found: dict[str, list[tuple[int, float]]] = {}
    steps = []
    for path in files:
        for record in map(Record.FromString, transaction_log(path.read_bytes())):
            assert record.run.run_id in ("", RUN_ID)
            row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if row:
                steps.append(row["_step"])
            for name in row.keys() & CURVES.keys():
                found.setdefault(name, []).append((row["_step"], row[name]))
    assert steps == list(range(13))
    assert found == CURVES


def _frames(record: bytes, lengths: list[int]) -> bytes:
    """`record` in pieces of these lengths, as in wandb's file: first, middle ..., last."""
    log = b""
    for index, length in enumerate(lengths):
        kind = 1 if len(lengths) == 1 else 2 if index == 0 else 4 if index == len(lengths) - 1 else 3
        data, record = record[:length], record[length:]
        log += struct.pack("<IHB", zlib.crc32(bytes([kind]) + data), length, kind) + data
    return log


def test_wandb_files_are_read_up_to_what_is_damaged() -> None:
    """Blocks of 32768 bytes, the file's header of 7 in the first; no frame begins in a block's last 6 bytes."""
    long = bytes(range(256)) * 300
    header = b":W&B" + bytes(3)
    rest = 32768 - 7 - 8 - 7
    log = header + _frames(b"x", [1]) + _frames(long, [rest, 32761, len(long) - rest - 32761]) + _frames(b"end", [3])
    assert list(transaction_log(log)) == [b"x", long, b"end"]
    for cut in range(len(log) - 10, len(log)):
        assert list(transaction_log(log[:cut])) == [b"x", long]
    flipped = bytearray(log)
    flipped[40000] ^= 1
    assert list(transaction_log(bytes(flipped))) == [b"x"]
    padded = header + _frames(b"x" * 32749, [32749]) + bytes(5) + _frames(b"end", [3])
    assert list(transaction_log(padded)) == [b"x" * 32749, b"end"]


def test_no_wandb_service_outlives_its_attempts(logged: Path) -> None:
    drivers = {r.event.pid for r in read_journal(logged / "wandb") if isinstance(r.event, AttemptStarted)}
    commands = [process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])]
    assert not [c for c in commands if c[0].endswith("wandb-core") and drivers & {int(x) for x in c if x.isdigit()}]


def test_a_service_is_ended_only_if_its_driver_is_dead_and_of_this_run() -> None:
    def service(driver: int) -> subprocess.Popen[bytes]:
        code = "print(flush=True); import time; time.sleep(600)"
        command = ["wandb-core", "-c", code, "--pid", str(driver)]
        process = subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    dead = subprocess.Popen(["true"])
    dead.wait()
    orphan, of_another_run, of_a_living_driver = services = service(dead.pid), service(2**22), service(os.getpid())
    try:
        end_orphaned_services({dead.pid, os.getpid()})
        assert not psutil.pid_exists(orphan.pid)
        assert of_another_run.poll() is None
        assert of_a_living_driver.poll() is None
    finally:
        for process in services:
            process.kill()
            process.communicate()


def test_a_service_that_may_not_be_ended_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> None:
        raise psutil.AccessDenied(2)

    service = SimpleNamespace(info={"cmdline": ["wandb-core", "--pid", "1"], "ppid": 2}, kill=denied)
    waited: list[Any] = []
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: [service])
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: waited.extend(processes))
    end_orphaned_services({1})
    assert waited == [service]


class Server:
    """wandb online: what the server got from the attempts before, and then only rising steps."""

    def __init__(self, *held: int) -> None:
        self.rows: dict[int, dict[str, Any]] = {step: {"seconds": 0.0} for step in held}
        self.down = False
        self.inits: list[dict[str, Any]] = []

    def init(self, **kwargs: Any) -> SimpleNamespace:
        self.inits.append(kwargs)
        return SimpleNamespace(step=max(self.rows, default=-1) + 1, offline=False)

    def log(self, data: dict[str, Any], step: int, commit: bool) -> None:
        if self.down:
            raise ConnectionResetError("the service died")
        assert commit
        assert step > max(self.rows, default=-1), f"step {step} is dropped"
        self.rows[step] = data


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    stand_in = Server()
    for name in ("init", "log"):
        monkeypatch.setattr(wandb, name, getattr(stand_in, name))
    monkeypatch.setattr(wandb, "finish", lambda exit_code: None)
    return stand_in


Attempt = Callable[..., ContinuedTracking]


@pytest.fixture
def attempt(tmp_path: Path, unsynced: None) -> Attempt:
    """The next attempt's tracker."""
    numbers = iter(range(1, 9))

    def begin(backend: str = "wandb", run_id: str = RUN_ID, run_dir: str = "run") -> ContinuedTracking:
        number = next(numbers)
        journal = Journal(tmp_path / run_dir, "driver", number)
        journal.append(RunStarted(run_id=run_id, config_digest="", planned_steps=9))
        run: Any = SimpleNamespace(directory=tmp_path / run_dir, journal=journal)
        return ContinuedTracking(run, Config(Trainer(backend)))

    return begin


def test_wandb_4482_steps_after_the_checkpoint_are_not_dropped(server: Server, attempt: Attempt) -> None:
    """Crash at 212, checkpoint 200; of 208 to 212 the server never heard."""
    first = attempt()
    for step in range(1, 213):
        first.log({"seconds": seconds(1, step)}, step=step, commit=True)
    for step in range(208, 213):
        del server.rows[step]
    second = attempt()
    for step in range(201, 216):
        second.log({"seconds": seconds(2, step)}, step=step, commit=True)
    assert list(server.rows) == list(range(1, 216))
    assert {s: row["seconds"] for s, row in server.rows.items()} == {
        s: seconds(1 + (s > 212), s) for s in range(1, 216)
    }
    assert [(x["id"], x["resume"]) for x in server.inits] == [(RUN_ID, "allow")] * 2


def test_what_is_missing_is_sent_when_nothing_is_left_to_run(server: Server, attempt: Attempt) -> None:
    attempt().log({"loss": 1.0}, step=9, commit=False)
    assert not server.rows
    attempt().finish()
    assert server.rows == {9: {"loss": 1.0}}


def test_evaluation_and_step_share_a_row(server: Server, attempt: Attempt) -> None:
    first = attempt()
    first.log({"loss": 1.0}, step=4, commit=False)
    first.run.journal.append(Evaluated(step=4, metrics={"eval": 0.5}))
    second = attempt()
    second.log({"loss": 1.0}, step=5, commit=True)
    assert server.rows == {4: {"loss": 1.0, "eval": 0.5}, 5: {"loss": 1.0}}


def test_within_an_attempt_the_last_value_counts_and_of_attempts_the_first(server: Server, attempt: Attempt) -> None:
    first = attempt()
    first.log({"loss": 1.0}, step=1, commit=False)
    first.log({"loss": 2.0}, step=1, commit=False)
    second = attempt()
    second.log({"loss": 3.0, "more": 4.0}, step=1, commit=True)
    assert server.rows == {1: {"loss": 2.0, "more": 4.0}}
    assert journaled(read_journal(first.run.directory)) == server.rows


def test_every_kind_of_value(server: Server, attempt: Attempt) -> None:
    values = {
        "nan": math.nan,
        "int": 3,
        "bool": True,
        "numpy": np.float32(0.1),
        "tensor": torch.tensor(2.5),
        "text": "seen",
        "many": np.ones(3),
    }
    first = attempt()
    first.log(values, step=1, commit=True)
    assert server.rows == {1: values}
    numbers = journaled(read_journal(first.run.directory))[1]
    assert math.isnan(numbers.pop("nan"))
    assert numbers == {"int": 3.0, "bool": 1.0, "numpy": float(np.float32(0.1)), "tensor": 2.5}


def test_a_logger_that_fails_stops_no_run(server: Server, attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    first = attempt()
    server.down = True
    first.log({"loss": 1.0}, step=1, commit=True)
    first.log({"loss": 2.0}, step=2, commit=True)
    assert [record.message for record in caplog.records] == [
        "wandb failed, metrics wait in the journal: ConnectionResetError('the service died')"
    ]
    server.down = False
    first.log({"loss": 3.0}, step=3, commit=True)
    assert server.rows == {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}


def test_wandb_that_does_not_answer_is_another_attempts_business(
    server: Server, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(error: Exception) -> Callable[..., Any]:
        def init(**kwargs: Any) -> Any:
            raise error

        return init

    monkeypatch.setattr(wandb, "init", refuse(wandb.errors.CommError("timed out")))
    with pytest.raises(WorkerLost, match="wandb does not answer: timed out"):
        attempt()
    monkeypatch.setattr(wandb, "init", refuse(wandb.errors.AuthenticationError("wrong key")))
    with pytest.raises(wandb.errors.AuthenticationError):
        attempt()


def test_a_table_is_sent_with_the_numbers_of_its_step(server: Server, attempt: Attempt) -> None:
    server.rows[1] = {}
    first = attempt()
    first.log_samples_to_table("samples", ["text"], [("repeated",)], step=1)
    first.log_samples_to_table("samples", ["text"], [("new",)], step=2)
    assert list(server.rows) == [1]  # a row of tables alone would pass for the step
    first.log({"loss": 2.0}, step=2, commit=True)
    assert server.rows[2].keys() == {"samples", "loss"}
    assert server.rows[2]["samples"].data == [["new"]]


def test_an_attempt_in_the_same_process_goes_on(server: Server, attempt: Attempt) -> None:
    tracker = attempt()
    tracker.log({"seconds": 1.0}, step=1, commit=True)
    tracker.log({"seconds": 2.0}, step=2, commit=True)
    tracker.log({"loss": 3.0}, step=3, commit=False)
    journal = Journal(tracker.run.directory, "driver", 7)
    again: Any = SimpleNamespace(directory=tracker.run.directory, journal=journal)
    tracker.go_on(again)
    tracker.log_samples_to_table("samples", ["text"], [("repeated",)], step=2)
    tracker.log({"seconds": 20.0}, step=2, commit=True)
    tracker.log({"loss": 30.0, "seconds": 30.0}, step=3, commit=True)
    assert server.rows == {1: {"seconds": 1.0}, 2: {"seconds": 2.0}, 3: {"loss": 3.0, "seconds": 30.0}}
    tracker.log_samples_to_table("samples", ["text"], [("new",)], step=4)
    tracker.log({"seconds": 40.0}, step=4, commit=True)
    assert server.rows[4]["samples"].data == [["new"]]
    assert [record.attempt for record in read_journal(tracker.run.directory)][-3:] == [7, 7, 7]


def test_an_attempt_that_leaves_keeps_back_the_step_it_is_in(server: Server, attempt: Attempt) -> None:
    first = attempt()
    first._local = True  # a server is not waited for
    first.log({"loss": 1.0}, step=1, commit=False)
    first.leave()
    assert not server.rows


def test_what_is_known_at_the_end_of_a_step_is_journaled_before_the_save(server: Server, attempt: Attempt) -> None:
    first = attempt()
    trainer = SimpleNamespace(tracker=first, all_metrics={"loss": 1.0}, global_step=3)
    MetricsAtStepEnd().on_step_end(trainer, None, None)
    assert journaled(read_journal(first.run.directory)) == {3: {"loss": 1.0}}


def test_a_tensorboard_folder_may_hold_other_runs(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "shared"))
    for run_id in ("a", "b"):
        first = attempt("tensorboard", run_id, run_id)
        first.log({run_id: 1.0, "loss": 1.0, "text": "left out"}, step=1, commit=True)
        first.finish()
    reader = EventAccumulator(str(tmp_path / "shared"), {"scalars": 0}, purge_orphaned_data=False)
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["a", "b", "loss"]
    assert len(reader.Scalars("loss")) == 2


def test_mlflow_gets_the_whole_curve_from_each_attempt(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[int, dict[str, float]]] = []
    mlflow = ModuleType("mlflow")
    vars(mlflow).update(
        active_run=lambda: None,
        set_experiment=lambda name: SimpleNamespace(experiment_id=name),
        start_run=lambda **kwargs: runs.append({}),
        log_params=lambda params: None,
        log_metrics=lambda metrics, step: runs[-1].update({step: metrics}),
        end_run=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    attempt("mlflow").log({"loss": 1.0}, step=1, commit=True)
    attempt("mlflow").log({"loss": 2.0}, step=2, commit=True)
    assert runs == [{1: {"loss": 1.0}}, {1: {"loss": 1.0}, 2: {"loss": 2.0}}]


def test_the_console_gets_what_this_attempt_does(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt("console").log({"seconds": 1.0}, step=1, commit=True)
    second = attempt("console")
    printed: list[Any] = []
    monkeypatch.setattr(second.logger, "log", lambda data, step: printed.append((step, data)))
    second.log({"seconds": 2.0}, step=1, commit=False)
    second.log({"note": "same row"}, step=1, commit=True)
    assert printed == [(1, {"seconds": 2.0, "note": "same row"})]
    second.go_on(second.run)
    second.log({"seconds": 3.0}, step=1, commit=True)
    assert printed[1:] == [(1, {"seconds": 3.0})]
