"""A journal gives back what was appended, whole lines only, in one order that does not depend on clocks agreeing."""

import errno
import math
import os
from collections.abc import Buffer
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import FormatError, StoreError
from checkpointing.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointRejected,
    Evaluated,
    Event,
    FaultWitnessed,
    RunFinished,
    StepDone,
    _Event,
)
from checkpointing.journal import Journal, JournalFollower, Record, read_journal

from .checkpoint_samples import without_fsync

STARTED = AttemptStarted(pid=1, resumed_from=None, world_size=2)
KILLED = AttemptEnded(exit_code=None, signal=9, reason="killed")


def step(number: int) -> StepDone:
    return StepDone(
        step=number,
        epoch=0,
        seconds=0.1,
        digest_seconds=1e-9,
        state={"policy/parameters": "ab"},
        tensors={"policy/parameters": {"w": "cd"}},
        data={"prompts": "ef"},
        scalars={"loss": float("nan").hex()},
        zero_advantages=False,
    )


EVENTS = st.one_of(
    st.integers(0, 10**6).map(step),
    st.builds(CheckpointRejected, step=st.integers(), commit=st.text(), reason=st.text()),
    st.builds(
        Evaluated,
        step=st.integers(),
        metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    ),
)


def events(run_dir: Path) -> list[Event]:
    return [record.event for record in read_journal(run_dir)]


def at(monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    monkeypatch.setattr("time.time", lambda: moment)


def test_a_follower_sees_each_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    follower = JournalFollower(tmp_path)
    assert follower.new() == []
    journal = Journal(tmp_path, "driver", 1)
    journal.append(RunFinished(planned_steps=3, last_step=1))
    journal.append(RunFinished(planned_steps=3, last_step=2))
    assert follower.new() == read_journal(tmp_path)
    assert follower.new() == []
    path = tmp_path / "journal" / "driver-000001.jsonl"
    whole = path.read_bytes()
    journal.append(RunFinished(planned_steps=3, last_step=3))
    journal.close()
    longer = path.read_bytes()
    path.write_bytes(longer[: len(whole) + 10])
    assert follower.new() == []
    path.write_bytes(longer)
    assert follower.new() == read_journal(tmp_path)[2:]


def test_what_is_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 12.5)
    journal = Journal(tmp_path / "run [x] ü", "driver", 1)
    journal.append(STARTED)
    journal.append(step(1))
    assert read_journal(tmp_path / "run [x] ü") == [
        Record(seq=0, time=12.5, attempt=1, writer="driver", event=STARTED),
        Record(seq=1, time=12.5, attempt=1, writer="driver", event=step(1)),
    ]
    (file,) = (tmp_path / "run [x] ü" / "journal").iterdir()
    assert file.name == "driver-000001.jsonl"
    assert file.read_text().startswith('{"attempt":1,"event":"attempt.started","pid":1,"resumed_from":null,"seq":0,')


def test_no_journal_is_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "never") == []


def test_no_event_has_a_field_of_the_line(tmp_path: Path) -> None:
    for kind in _Event.__subclasses__():
        assert not {"seq", "time", "attempt", "writer"} & kind.model_fields.keys()


@given(st.lists(EVENTS, min_size=1, max_size=5), st.floats(0, 1))
def test_any_truncation_leaves_a_prefix_and_can_be_continued(written: list[Event], share: float) -> None:
    with TemporaryDirectory() as folder, without_fsync():
        run_dir = Path(folder)
        journal = Journal(run_dir, "driver", 1)
        for event in written:
            journal.append(event)
        journal.close()
        assert events(run_dir) == written
        (file,) = (run_dir / "journal").iterdir()
        whole = file.read_bytes()
        kept = whole[: round(share * len(whole))]
        file.write_bytes(kept)
        assert events(run_dir) == written[: kept.count(b"\n")]
        again = Journal(run_dir, "driver", 1)
        again.append(STARTED)
        again.close()
        assert events(run_dir) == [*written[: kept.count(b"\n")], STARTED]


def test_an_append_is_on_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, int]] = []

    def fsync(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink(), os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    journal = Journal(tmp_path / "run", "driver", 1)
    assert {tmp_path, tmp_path / "run", tmp_path / "run" / "journal"} <= {path for path, _ in synced}
    journal.append(STARTED)
    file = tmp_path / "run" / "journal" / "driver-000001.jsonl"
    assert synced[-1] == (file, file.stat().st_size) != (file, 0)


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_an_append_that_fails_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    journal = Journal(tmp_path, "driver", 1)
    journal.append(STARTED)
    write, calls = os.write, []

    def fail(fd: int, data: Buffer | None = None) -> int:
        calls.append(fd)
        if data and len(calls) == 1:
            return write(fd, memoryview(data)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        with pytest.raises(StoreError, match=r"driver-000001.jsonl: No space left on device; free some space"):
            journal.append(step(1))
    assert events(tmp_path) == [STARTED]
    journal.append(step(2))
    assert events(tmp_path) == [STARTED, step(2)]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda lines: [lines[0], b"garbage", lines[2]], ":2: not a line of a journal"),
        (lambda lines: [lines[0], lines[1][:20], lines[2]], ":2: not a line of a journal"),
        (lambda lines: [lines[0], b"", lines[2]], ":2: not a line of a journal"),
        (lambda lines: [lines[0], b"[]", lines[2]], ":2: not a line of a journal"),
        (lambda lines: [lines[0], lines[2]], ":2: .*lines were lost or mixed up"),
        (lambda lines: [lines[0], lines[0], lines[1]], ":2: .*lines were lost or mixed up"),
        (lambda lines: [lines[0].replace(b"driver", b"rank")], ":1: .*lines were lost or mixed up"),
        (lambda lines: [lines[0].replace(b"attempt.started", b"attempt.stopped")], ":1: .*attempt.stopped"),
        (lambda lines: [lines[0].replace(b'"pid":1', b'"pid":"x"')], ":1: .*integer"),
        (lambda lines: [lines[0].replace(b'"pid"', b'"gid"')], ":1: .*"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(tmp_path: Path, damage: object, complaint: str) -> None:
    journal = Journal(tmp_path, "driver", 1)
    written: list[Event] = [STARTED, step(1), step(2)]
    for event in written:
        journal.append(event)
    (file,) = (tmp_path / "journal").iterdir()
    assert callable(damage)
    file.write_bytes(b"".join(line + b"\n" for line in damage(file.read_bytes().splitlines())))
    with pytest.raises(FormatError, match=str(file) + complaint):
        read_journal(tmp_path)


def test_order_is_by_attempt_and_the_end_of_an_attempt_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's clock runs ahead of the supervisor's, and is set back once."""
    witnessed = FaultWitnessed(
        index=0, fault="sigkill", target="driver", phase="save.begin", step=2, pid=1, evidence="gone"
    )
    finished = RunFinished(planned_steps=2, last_step=2)
    driver, supervisor = Journal(tmp_path, "driver", 1), Journal(tmp_path, "supervisor", 1)
    next_driver, next_supervisor = Journal(tmp_path, "driver", 2), Journal(tmp_path, "supervisor", 2)
    story: list[tuple[float, Journal, Event]] = [
        (100.0, driver, STARTED),
        (103.0, driver, step(1)),
        (101.0, driver, step(2)),
        (102.0, supervisor, witnessed),
        (102.5, supervisor, KILLED),
        (50.0, next_driver, STARTED),
        (60.0, next_supervisor, KILLED),
        (61.0, next_supervisor, finished),
    ]
    for moment, journal, event in story:
        at(monkeypatch, moment)
        journal.append(event)
    assert events(tmp_path) == [STARTED, witnessed, step(1), step(2), KILLED, STARTED, KILLED, finished]


def test_a_writer_that_could_climb_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="writer"):
        Journal(tmp_path, "../driver", 1)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_refuses_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("not a folder")
    with pytest.raises(StoreError, match="journal"):
        Journal(tmp_path, "driver", 1)


def test_a_float_that_json_has_no_word_for_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "driver", 1)
    journal.append(Evaluated(step=1, metrics={"nan": math.nan, "up": math.inf, "down": -math.inf, "success": 0.1}))
    journal.append(STARTED)
    (line, _) = (tmp_path / "journal" / "driver-000001.jsonl").read_text().splitlines()
    assert '"metrics":{"down":"-Infinity","nan":"NaN","success":0.1,"up":"Infinity"}' in line
    seen, _ = events(tmp_path)
    assert isinstance(seen, Evaluated)
    assert math.isnan(seen.metrics["nan"])
    assert (seen.metrics["up"], seen.metrics["down"], seen.metrics["success"]) == (math.inf, -math.inf, 0.1)


def test_a_journal_that_is_closed_writes_to_nobody_s_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "driver", 1)
    journal.append(RunFinished(planned_steps=1, last_step=1))
    journal.close()
    journal.close()
    later = Journal(tmp_path, "driver", 2)  # the kernel gives it the number that the first one had
    with pytest.raises(StoreError, match="this journal is closed"):
        journal.append(RunFinished(planned_steps=1, last_step=1))
    later.append(RunFinished(planned_steps=2, last_step=2))
    later.close()
    assert [record.attempt for record in read_journal(tmp_path)] == [1, 2]


def test_no_secret_gets_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "abcdefghijkl")
    event = AttemptEnded(exit_code=1, signal=None, reason="at abcdefghijkl", last_lines=["s3://u:hunter22@h/x"])
    with closing(Journal(tmp_path, "supervisor", 1)) as journal:
        journal.append(event)
    (path,) = (tmp_path / "journal").iterdir()
    assert b"abcdefghijkl" not in path.read_bytes() and b"hunter22" not in path.read_bytes()
