"""A secret of the environment does not get into what a run leaves behind, whoever repeats it. (By form:
test_redaction.py; what real runs leave is searched with `assert_no_secret` as well.)"""

import base64
import io
import json
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import AfterValidator
from rich.console import Console

import trainer.run
from chaos.report import Drill, Repeat, render
from checkpointing.errors import ConfigError, HarnessError
from checkpointing.events import AttemptEnded, Event, RunStopped
from checkpointing.journal import Journal, read_journal
from checkpointing.redaction import redactor
from checkpointing.tiers import Tiers
from harness.living import show_events, show_status
from harness.logs import LogStream, stream_path
from harness.results import nothing_proved, shown
from harness.status import RunView
from tests.secrets import assert_no_secret
from trainer.ending import end_process
from trainer.run import claim_directory

from .cli_samples import harness

SECRET = 'correct horse/"bättery"+st%ple'
TEXT = f"403: {SECRET} was refused"
KINDS = typing.get_args(typing.get_args(Event)[0])

NAMES = {
    "commit",
    "commits",
    "config_digest",
    "data",
    "entries",
    "fault",
    "metrics",
    "names",
    "node",
    "phase",
    "role",
    "run_id",
    "scalars",
    "session",
    "state",
    "target",
    "tensors",
    "tier",
}
"""Fields of events that hold names and digests which the harness makes, and nobody's words."""


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAM_DB_PASSWORD", SECRET)


@pytest.mark.parametrize(
    "content",
    [
        TEXT,
        json.dumps({"a": TEXT}),
        json.dumps({"a": TEXT}, ensure_ascii=False),
        f"https://host/?q={quote(SECRET, safe='')}",
        "Basic " + base64.b64encode(b"me:" + SECRET.encode()).decode(),
    ],
    ids=["as it is", "JSON", "UTF-8 JSON", "URL", "base64"],
)
def test_the_search_finds_what_is_there(tmp_path: Path, content: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text(content)
    with pytest.raises(AssertionError, match=r"the secret is in .*deep/file"):
        assert_no_secret(tmp_path, SECRET)
    (tmp_path / "deep" / "file").write_text("nothing")
    assert_no_secret(tmp_path, SECRET)
    with pytest.raises(AssertionError, match="nothing there"):
        assert_no_secret(tmp_path / "absent", SECRET)


def test_it_finds_one_line_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("key is SECONDLINE!")
    with pytest.raises(AssertionError, match="the secret is in"):
        assert_no_secret(tmp_path, "-----BEGIN-----\nSECONDLINE\n")


def test_each_line_of_a_key_is_left_out() -> None:
    redact = redactor({"MY_PRIVATE_KEY": "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2Vw\n"})
    assert redact("it is MC4CAQAwBQYDK2Vw, in one line") == "it is ***, in one line"


def filled(kind: type[Any]) -> dict[str, Any]:
    """Fields of an event, with the secret in all that are anybody's words."""
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        told = str(field.annotation)
        words = any(isinstance(mark, AfterValidator) for mark in field.metadata) or "AfterValidator" in told
        if words or (field.annotation is str and name not in NAMES):
            fields[name] = [TEXT] if "list" in told else TEXT
        elif field.is_required():
            empty = {"dict": {}, "list": [], "str": "x", "int": 1, "float": 1.0, "bool": False}
            fields[name] = next(value for kind_of, value in empty.items() if kind_of in told)
        else:
            assert name in NAMES or "str" not in told or name == "event", f"{kind.__name__}.{name}: Words, or a name?"
    return fields


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_no_event_repeats_it(tmp_path: Path, kind: type[Any]) -> None:
    journal = Journal(tmp_path, "driver", 1)
    journal.append(kind(**filled(kind)))
    assert_no_secret(tmp_path, SECRET)
    assert len(read_journal(tmp_path)) == 1


def test_there_are_events_with_words_to_try() -> None:
    assert {"reason", "last_lines", "evidence", "url"} <= {
        name for kind in KINDS for name in filled(kind) if name not in NAMES
    }


def test_run_json_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs may take values from the environment."""
    config = {"trainer": {"logger": SECRET, "deep": [{"url": f"https://me:{SECRET}@host"}], "seed": 1}}
    monkeypatch.setattr(trainer.run, "get_config_as_dict", lambda cfg: config)
    tiers = Tiers.open([str(tmp_path / "store")])
    claim_directory(tiers, SimpleNamespace(trainer=SimpleNamespace(seed=1)), {"config": "c0ffee"})
    assert_no_secret(tmp_path, SECRET)
    assert json.loads(tiers.get("run.json"))["config"]["trainer"]["seed"] == 1


def test_the_stream_of_logs_does_not(tmp_path: Path) -> None:
    logs, engine = tmp_path / "run" / "logs", tmp_path / "engine.log"
    stream = LogStream(logs, [engine], tmp_path / "sessions")
    stream.begin(1)
    engine.write_text(f"{TEXT}\nall is well\n")
    stream.end()
    assert_no_secret(tmp_path / "run", SECRET)
    assert len(stream_path(logs, 1).read_bytes().splitlines()) == 2


def test_raw_logs_do_not_once_they_are_copied(tmp_path: Path) -> None:
    """What a process writes by itself has the secret until the supervisor has come to it."""
    logs = tmp_path / "logs"
    driver, engine, rank = (logs / name for name in ("attempt-000002.log", "engine-0.log", "ranks-1-2-policy-0-3.log"))
    logs.mkdir()
    left = logs / "attempt-000001.log"
    for path in (left, engine):  # by a supervisor that was killed
        path.write_text(f"before\n{TEXT}\nafter\n")
    stream = LogStream(logs, [engine], tmp_path / "sessions")
    assert_no_secret(logs, SECRET)
    stream.begin(2)
    with driver.open("ab") as process, engine.open("ab") as other:
        for sink in (process, other):
            sink.write(f"{'x' * 100_000}{SECRET}\n{TEXT}\n".encode())
            sink.flush()
        rank.write_text(f"{TEXT}\n{TEXT}")
        for _ in range(5):
            stream.look()
        for sink in (process, other):
            sink.write(b"and on\n")
    stream.end()
    assert_no_secret(logs, SECRET)
    assert driver.stat().st_size == len(f"{'x' * 100_000}{SECRET}\n{TEXT}\nand on\n".encode())
    lines = driver.read_text().splitlines()
    assert lines[0].startswith("x" * 100_000) and lines[1].rstrip() == "403: *** was refused" and lines[2] == "and on"
    assert left.read_text().split() == ["before", "403:", "***", "was", "refused", "after"]


def test_reports_status_and_verdicts_do_not(tmp_path: Path) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    told.mkdir()
    journal = Journal(run, "supervisor", 1)
    journal.append(AttemptEnded(exit_code=1, signal=None, reason=TEXT, last_lines=[TEXT]))
    journal.append(RunStopped(exit_code=1, reason=TEXT))
    records = read_journal(run)
    drill = Drill("title", "failed", ["reason"], records, records, Repeat(command="again"))
    (told / "report.html").write_text(render(drill))
    (told / "status.json").write_text(RunView(str(run)).look().model_dump_json())
    result = nothing_proved(Path("drill.yaml"), "not run", ConfigError(TEXT))
    (told / "verdict.json").write_text(result.model_dump_json())
    console = Console(file=(said := io.StringIO()), width=1000)
    shown(result, console)
    show_status(str(run), console, False)
    show_events(run, console, False, False)
    (told / "terminal").write_text(said.getvalue())
    assert "was refused" in said.getvalue() and "was refused" in (told / "verdict.json").read_text()
    assert_no_secret(tmp_path, SECRET)


def test_commands_do_not(tmp_path: Path) -> None:
    said = harness("check", tmp_path / SECRET)
    assert said.code == ConfigError.exit_code and "***" in said.err and SECRET not in said.err


@pytest.mark.parametrize("error", [HarnessError(TEXT), ValueError(TEXT)], ids=["told", "unforeseen"])
def test_the_last_words_of_a_driver_do_not(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("trainer.ending.os._exit", sys.exit)
    with pytest.raises(SystemExit):
        end_process(fail)
    said = capsys.readouterr().err
    assert "403: *** was refused" in said.splitlines()[-1] and SECRET not in said
