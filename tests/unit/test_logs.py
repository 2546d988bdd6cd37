"""One stream per attempt: every line of every process once, whole, with who said it, and nothing secret."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.errors import ConfigError
from checkpointing.events import AttemptEnded, AttemptStarted, RunStopped
from checkpointing.journal import Journal
from harness import logs
from harness.ending import first_dead
from harness.logs import MAX_LINE, PER_LOOK, PIECE, LogStream, Tail, stream_path, streams
from harness.processes import reap
from trainer.logs import log_environment, use_own_log

from .cli_samples import harness


def add(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def drained(tail: Tail, last: bool = False) -> list[bytes]:
    found: list[bytes] = []
    while (new := tail.new(last))[1]:
        found += new[0]
    return found


# One file


def test_a_line_counts_when_it_has_ended(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    assert tail.new() == ([], 0), "not there yet"
    add(tail.path, "one\ntw")
    assert tail.new() == ([b"one"], 6)
    assert tail.new() == ([], 0), "read again only when it has grown"
    add(tail.path, "o\n\nthree")
    assert tail.new()[0] == [b"two", b""]
    assert drained(tail, last=True) == [b"three"] and tail.new(last=True) == ([], 0)


def test_a_file_that_shrinks_is_read_anew(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    add(tail.path, "a long first line\n")
    assert drained(tail) == [b"a long first line"]
    tail.path.write_text("new\n")
    assert drained(tail) == [b"new"]
    tail.path.unlink()
    assert drained(tail) == []


def test_of_a_line_without_end_only_the_beginning_is_read(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log")
    add(tail.path, b"x" * (3 * PIECE + 5))
    assert [len(line) for line in drained(tail)] == [PIECE]
    add(tail.path, b"y" * PIECE + b"\nafter\n")
    assert drained(tail) == [b"after"]
    add(tail.path, b"z" * (PIECE + 1))
    assert [len(line) for line in drained(tail, last=True)] == [PIECE]


@settings(max_examples=50)
@given(st.lists(st.text("ab\r\n", max_size=12).map(str.encode), max_size=12), st.data())
def test_whatever_the_pieces_every_line_comes_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], data: st.DataObject
) -> None:
    tail, found = Tail(tmp_path_factory.mktemp("tail") / "log"), []
    for piece in pieces:
        add(tail.path, piece)
        if data.draw(st.booleans()):
            found += drained(tail)
    found += drained(tail, last=True)
    whole = b"".join(pieces)
    assert found == (whole.removesuffix(b"\n").split(b"\n") if whole else [])


# The stream of an attempt


class Run:
    """A run directory with one engine, and a session whose temporary files Ray writes its logs to."""

    def __init__(self, folder: Path) -> None:
        self.run, self.scratch = folder / "run", folder / "scratch"
        self.logs, self.ray = self.run / "logs", self.scratch / "session_2026-11-29_1" / "logs"
        self.logs.mkdir(parents=True)
        self.engine, self.ledger = self.logs / "engine-0.log", self.logs / "driver.sessions"
        add(self.engine, "of a supervisor before this one\n")
        self.stream = LogStream(self.logs, [self.engine], self.ledger)

    def begin(self, attempt: int = 1) -> Path:
        """Returns the driver's log."""
        self.stream.begin(attempt)
        self.ray.mkdir(parents=True, exist_ok=True)
        (self.scratch / "session_latest").unlink(missing_ok=True)
        (self.scratch / "session_latest").symlink_to(self.ray.parent)
        self.ledger.write_text(json.dumps({"session": 2**30, "started": 0.0, "scratch": str(self.scratch)}) + "\n")
        return self.logs / f"attempt-{attempt:06d}.log"

    def said(self, attempt: int = 1) -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in stream_path(self.logs, attempt).read_bytes().splitlines()]
        assert all(set(line) == {"time", "attempt", "process", "line"} and line["attempt"] == attempt for line in lines)
        return [(line["process"], line["line"]) for line in lines]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_every_process_and_who_it_is(run: Run) -> None:
    add(run.logs / "ranks-20261129-110000-policy-0-5.log", "of an attempt before\n")
    add(run.logs / "attempt-000001.log", "of an attempt that died before it had a number\n")
    driver = run.begin()
    worker = "worker-0a1b-01000000-"
    add(driver, "starting\n")
    add(run.engine, "loading\n")
    add(run.ray / f"{worker}4711.out", ":job_id:01000000\n:actor_name:_Keeper\nwriting\n")
    add(run.ray / f"{worker}4712.err", ":job_id:01000000\nwarming\n")
    add(run.ray / "raylet.err", "check failed\n")
    trouble = "[2026-11-29 19:21:51,761 E 16890 16890] (raylet) out of disk"
    add(run.ray / "raylet.out", f"[2026-11-29 19:21:51,761 I 16890 16890] (raylet) chatter\n{trouble}\n")
    add(run.ray / "gcs_server.out", "[2026-11-29 19:21:51,761 C 1 1] (gcs) failed\n")
    add(run.ray / "log_monitor.err", "not of interest\n")
    run.stream.look()
    add(run.logs / "ranks-20261129-120000-policy-1-4712.log", "out of memory\n")
    add(run.logs / "ranks-20261129-120000.log", "an engine that SkyRL started\n")
    run.stream.look()
    add(run.ray / f"{worker}4712.err", "killed\n")
    run.stream.look()
    assert sorted(run.said()) == sorted(
        [
            ("driver", "starting"), ("engine-0", "loading"), ("Keeper (pid 4711)", "writing"),
            ("worker (pid 4712)", "warming"), ("raylet", "check failed"), ("raylet", trouble),
            ("gcs_server", "[2026-11-29 19:21:51,761 C 1 1] (gcs) failed"),
            ("policy rank 1 (pid 4712)", "out of memory"), ("skyrl", "an engine that SkyRL started"),
            ("policy rank 1 (pid 4712)", "killed"),
        ]
    )  # fmt: skip


def test_what_a_person_can_read_and_nobody_may_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-hunter2")
    run = Run(run.run / "another")
    driver = run.begin()
    add(driver, "\x1b[36m(_PolicyRank pid=7)\x1b[0m loaded\n")
    add(driver, b"10%|#  |\r50%|## |\r100%|###|\r\n")
    add(driver, b"\xff\xfe not text\n")
    add(driver, "login with hunter2-hunter2 at https://me:secret@host\n\n   \n")
    add(driver, "x" * (MAX_LINE + 7) + "\n")
    run.stream.look()
    lines = [line for _, line in run.said()]
    assert lines[:4] == [
        "(_PolicyRank pid=7) loaded",
        "100%|###|",
        "\ufffd\ufffd not text",
        "login with *** at https://me:***@host",
    ]
    assert lines[4:] == ["x" * MAX_LINE + " [cut]"]


def test_the_last_look_is_before_the_files_go_and_leaves_nothing(run: Run) -> None:
    driver = run.begin()
    many = "".join(f"{number} {'.' * 90}\n" for number in range(10_000))
    assert len(many) > 3 * PER_LOOK
    add(driver, many + "error: the cause")
    add(run.ray / "worker-0a1b-01000000-4711.err", "last words")
    add(run.engine, "said by one that lives on, not yet en")
    reap(run.ledger, run.stream.end)
    assert not run.scratch.exists()
    said = run.said()
    assert len(said) == 10_002
    assert ("driver", "error: the cause") in said and ("worker (pid 4711)", "last words") in said
    run.begin(2)
    add(run.engine, "ded\n")
    run.stream.look()
    assert run.said(2) == [("engine-0", "said by one that lives on, not yet ended")]
    reap(run.ledger, run.stream.end)


def test_a_look_reads_little_and_everyone_has_their_turn(run: Run) -> None:
    driver = run.begin()
    add(driver, ("." * 99 + "\n") * 100_000)
    for pid in range(8):
        add(run.ray / f"worker-0a1b-01000000-{pid}.out", ("." * 99 + "\n") * 5_000)
    run.stream.look()
    copied = sum(len(line) + 1 for _, line in run.said())
    assert PER_LOOK - PIECE < copied <= PER_LOOK
    run.stream.look()
    run.stream.look()
    assert len({process for process, _ in run.said()}) == 9


def test_a_look_at_files_that_have_not_grown_opens_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    add(run.begin(), "said\nhalf")
    run.stream.look()

    def opened(*_: Any) -> Any:
        raise AssertionError("opened")

    monkeypatch.setattr(Path, "open", opened)
    run.stream.look()


def test_half_a_line_of_a_supervisor_that_was_killed_is_removed(run: Run) -> None:
    add(run.begin(), "said before\n")
    run.stream.look()
    add(stream_path(run.logs, 1), b'{"time":1,"li')
    add(run.begin(), "said after\n")
    run.stream.look()
    assert run.said() == [("driver", "said before"), ("driver", "said after")]


def test_storage_that_refuses_ends_the_stream_and_not_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = run.begin()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "write_all", full)
    add(driver, "one\n")
    for _ in range(3):
        run.stream.look()
        add(driver, "more\n")
    reap(run.ledger, run.stream.end)
    assert [record.getMessage() for record in caplog.records] == [
        "attempt 1: its lines are no longer gathered in one stream: [Errno 28] No space left on device"
    ]


def test_a_file_that_can_t_be_read_is_said_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = run.begin()
    (run.ray / "worker-0a1b-01000000-7.out").mkdir()  # stands for whatever can't be read
    add(driver, "")
    for _ in range(3):
        run.stream.look()
    assert run.said() == [("worker-0a1b-01000000-7.out", "can't be read further: Is a directory")]


def test_a_folder_that_can_t_be_listed_is_said_once_and_what_is_known_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = run.begin()

    def stale(*_: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(logs, "_names_in", stale)
        for _ in range(3):
            add(driver, "line\n")
            run.stream.look()
        assert run.said() == [("driver", "line")] * 3
    add(run.ray / "raylet.err", "found when it can be\n")
    run.stream.look()
    monkeypatch.setattr(logs, "_names_in", stale)
    reap(run.ledger, run.stream.end)
    assert run.said()[3:] == [("raylet", "found when it can be")]
    assert [record.getMessage() for record in caplog.records] == [
        "attempt 1: logs that are new can't be found: [Errno 116] Stale file handle"
    ]


def test_a_new_attempt_begins_where_nothing_can_be_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", denied)
        broken.setattr(os, "listdir", denied)
        run.stream.begin(1)


def test_the_log_of_a_rank_is_where_its_last_words_are(tmp_path: Path) -> None:
    driver, own = tmp_path / "attempt-000001.log", tmp_path / "ranks-20261129-120000-policy-1-12.log"
    add(driver, "error: policy rank 1 (pid 12) died\n")
    worker = tmp_path / "scratch" / "session_1" / "logs" / "worker-0a-01000000-12.err"
    add(worker, ":job_id:01000000\n")
    words = "error: policy rank 1 (pid 12) died"
    assert first_dead(words, driver, tmp_path / "scratch") == worker
    add(own, "CUDA error\n")
    assert first_dead(words, driver, tmp_path / "scratch") == own


def test_every_rank_has_a_log_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.begin()
    for rank in range(2):
        (name, shared), *others = log_environment(run.run, through_driver=False).items()
        monkeypatch.setenv(name, shared)
        use_own_log("policy", rank)
        add(Path(os.environ[name]), "redirected\n")  # as SkyRL's worker does there
        assert others == []
    run.stream.look()
    assert sorted(run.said()) == [(f"policy rank {n} (pid {os.getpid()})", "redirected") for n in range(2)]
    assert log_environment(run.run, through_driver=True)["SKYRL_DUMP_INFRA_LOG_TO_STDOUT"] == "1"
    monkeypatch.delenv(name)
    use_own_log("policy", 0)
    assert name not in os.environ


# `harness logs`


def test_the_newest_attempt_or_the_one_asked_for(run: Run) -> None:
    for attempt in (1, 2):
        add(run.begin(attempt), f"said by [red]{attempt}[/red]\n")
        reap(run.ledger, run.stream.end)
    told = harness("logs", run.run)
    assert told.code == 0 and told.out.split(" ", 1)[1] == "driver said by [red]2[/red]\n"
    (line,) = harness("logs", run.run, "--attempt", 1, "--json").out.splitlines()
    assert (json.loads(line)["attempt"], json.loads(line)["line"]) == (1, "said by [red]1[/red]")
    assert streams(run.run) == [1, 2]


def test_nothing_to_show(run: Run, tmp_path: Path) -> None:
    told = harness("logs", tmp_path)
    assert told.code == ConfigError.exit_code and "no logs there" in told.err
    run.begin()
    reap(run.ledger, run.stream.end)
    told = harness("logs", run.run, "--attempt", 7)
    assert told.code == ConfigError.exit_code and "no logs of attempt 7" in told.err


def test_followed_over_attempts_until_the_run_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def journal(attempt: int, *events: Any) -> None:
        written = Journal(run.run, "supervisor", attempt)
        for event in events:
            written.append(event)
        written.close()

    def second() -> None:
        reap(run.ledger, run.stream.end)
        journal(1, AttemptEnded(exit_code=17, signal=None, reason="lost"))
        add(run.begin(2), "two\n")
        journal(2, AttemptStarted(pid=1, resumed_from=None, world_size=1))
        run.stream.look()

    def third() -> None:
        add(run.logs / "attempt-000002.log", "three\n")
        reap(run.ledger, run.stream.end)
        journal(2, AttemptEnded(exit_code=0, signal=None, reason="complete"))

    journal(1, RunStopped(exit_code=75, reason="of an earlier supervisor"))
    journal(1, AttemptStarted(pid=1, resumed_from=None, world_size=1))
    add(run.begin(1), "one\n")
    run.stream.look()
    later = [second, third]
    monkeypatch.setattr("time.sleep", lambda seconds: later.pop(0)())
    lines = harness("logs", run.run, "--follow").out.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["driver one", "driver two", "driver three"]
