"""A phase trace holds what processes reached, whatever became of them."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing import phases
from checkpointing.disk import write_all
from checkpointing.errors import FormatError
from checkpointing.trace import read_trace, trace_folder, trace_phases


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process leaves its trace there."""
    monkeypatch.setattr(phases, "_watchers", [])
    monkeypatch.setenv("HARNESS_TRACE", str(trace_folder(tmp_path)))
    trace_phases()
    yield trace_folder(tmp_path)


def seen(folder: Path) -> list[tuple[str, str, int]]:
    return [(mark.process, mark.phase, mark.step) for mark in read_trace(folder)]


def test_what_is_reached_is_read(folder: Path) -> None:
    phases.reached("store.put_written", key="x")
    assert seen(folder) == [], "nobody knows yet which process this is"
    phases.reached("worker.started", role="policy", rank=1)
    phases.reached("train.forward_backward", role="policy", rank=1, step=3)
    phases.reached("store.put_written", key="x")

    assert seen(folder) == [
        ("policy:1", "worker.started", 0),
        ("policy:1", "train.forward_backward", 3),
        ("policy:1", "store.put_written", 3),  # which says no step: it is in the one of this thread
    ]
    assert [path.name for path in folder.iterdir()] == [f"policy-1-{os.getpid()}.jsonl"]
    times = [mark.time for mark in read_trace(folder)]
    assert times == sorted(times)


def test_another_process_is_announced_under_its_own_name(folder: Path) -> None:
    phases.reached("driver.started", role="driver", attempt=1, pid=os.getpid())
    phases.reached("worker.started", role="engine", rank=0, pid=os.getpid() + 1)
    phases.reached("generate.begin", step=1)
    assert [(mark.process, mark.pid - os.getpid()) for mark in read_trace(folder)] == [
        ("driver", 0),
        ("engine:0", 1),
        ("driver", 0),
    ]


def test_a_process_that_kills_itself_at_a_place_has_said_so(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom checkpointing import phases\nfrom checkpointing.trace import trace_phases\n"
        "trace_phases()\nphases.reached('driver.started', role='driver')\n"
        "phases.watch(lambda name, where: os.kill(os.getpid(), signal.SIGKILL))\nphases.reached('step.trained', step=2)"
    )
    folder = trace_folder(tmp_path)
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"HARNESS_TRACE": str(folder)}, check=False)
    assert ended.returncode == -9
    assert seen(folder)[-1] == ("driver", "step.trained", 2)


def test_without_the_variable_there_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_watchers", [])
    monkeypatch.delenv("HARNESS_TRACE", raising=False)
    trace_phases()
    assert phases._watchers == []
    assert read_trace(trace_folder(tmp_path)) == []


def test_a_full_disk_ends_the_trace_and_not_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    phases.reached("driver.started", role="driver")

    def half(fd: int, data: bytes) -> None:
        write_all(fd, data[:10])
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("checkpointing.trace.write_all", half)
    with caplog.at_level(logging.WARNING):
        phases.reached("step.trained", step=1)
    monkeypatch.setattr("checkpointing.trace.write_all", write_all)
    phases.reached("step.trained", step=2)

    assert seen(folder) == [("driver", "driver.started", 0)], "what is torn must not be glued to a later line"
    assert [record.message for record in caplog.records] == [
        "the phase trace of driver ends here: [Errno 28] no space left"
    ]


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", '{"time": 1, "process": "driver", "pid": 1, "phase": "x", "step": "y"}']
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    good = '{"time": 1, "process": "driver", "pid": 1, "phase": "x", "step": 1}\n'
    (tmp_path / "driver-1.jsonl").write_text(f"{good}{line}\n{good}")
    with pytest.raises(FormatError, match=r"driver-1\.jsonl:2: not a line of a phase trace"):
        read_trace(tmp_path)
