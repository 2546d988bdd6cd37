"""What `harness status`, `runs`, `events`, `logs`, `stop` and `resume` do. RUN: a run directory, of
`status` also the URL of a store."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from checkpointing.canonical import canonical_json
from checkpointing.errors import ConfigError
from checkpointing.events import AttemptEnded, AttemptStarted, RunFinished, RunStopped
from checkpointing.journal import JournalFollower, Record
from harness.commands import read_run, start
from harness.logs import Tail, stream_path, streams
from harness.output import age, duration, say, show_table
from harness.runs import recorded_run
from harness.status import RunView, Status, status_of_store
from harness.stopping import STOP_FILE

LOOK_SECONDS = 1.0

HEARD_WITHIN = 30.0
"""Seconds, beyond its time of grace, that a supervisor may take to hear that it is to stop."""


def show_status(run: str, console: Console, as_json: bool) -> None:
    """Once; on a terminal again and again, until the run ends or Ctrl-C. Of a store: once."""
    view = None if "://" in run else RunView(run)
    seen = view.look() if view else status_of_store(run)
    if as_json:
        console.print_json(seen.model_dump_json())
        return
    if view is None or not console.is_terminal:
        for name, value in _facts(seen):
            say(console, f"{name}: {value}")
        return
    try:
        with Live(_table(seen), console=console, auto_refresh=False) as live:
            while seen.state == "running":
                time.sleep(LOOK_SECONDS)
                seen = view.look()
                live.update(_table(seen), refresh=True)
    except KeyboardInterrupt:
        pass  # how one leaves a live view


def _table(seen: Status) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(seen):
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _facts(seen: Status) -> Iterator[tuple[str, str]]:
    yield "run", seen.run
    yield "state", f"{seen.state} ({seen.stopped_because})" if seen.stopped_because else seen.state
    yield "step", f"{seen.step} of {_or_dash(seen.planned)}"
    yield "phase", f"{seen.phase or '-'}, last sign {age(seen.last_sign)} ago"
    yield "rate", "-" if seen.seconds_per_step is None else f"{seen.seconds_per_step:.1f} s a step"
    yield "reward", "-" if seen.reward is None else f"{seen.reward:.4f}"
    yield "newest checkpoint", f"local {_or_dash(seen.newest_local)}, durable {_or_dash(seen.newest_durable)}"
    yield "attempts", str(seen.attempts)
    if (failure := seen.last_failure) is not None:
        where = f"{failure.phase or 'start'} of step {failure.step or 0}"
        yield "last failure", f"attempt {failure.attempt} in {where}, {age(failure.time)} ago: {failure.reason}"
    if seen.expected_end is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(seen.expected_end))
        yield "expected end", f"{at}, in {duration(max(0.0, seen.expected_end - time.time()))}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def show_runs(folder: Path, console: Console, as_json: bool) -> None:
    """Every run in `folder`, and in the folders in it."""
    journals = sorted({*folder.glob("journal"), *folder.glob("*/journal"), *folder.glob("*/*/journal")})
    seen = [RunView(str(path.parent)).look() for path in journals if any(path.glob("*.jsonl"))]
    if as_json:
        console.print_json(data=[one.model_dump(mode="json") for one in seen])
        return
    if not seen:
        raise ConfigError(f"{folder}: no run there")
    rows = (
        (
            one.run,
            one.state,
            f"{one.step}/{_or_dash(one.planned)}",
            _or_dash(one.newest_local),
            _or_dash(one.newest_durable),
            str(one.attempts),
            age(one.last_sign),
            one.stopped_because or (one.last_failure.reason if one.last_failure else ""),
        )
        for one in seen
    )
    show_table(console, ("run", "state", "step", "local", "durable", "attempts", "last sign", "last failure"), rows)


def show_events(run: Path, console: Console, follow: bool, as_json: bool) -> None:
    """The journal, in order. `follow`: then what is added to it, until the run ends or Ctrl-C."""
    write = _write_json if as_json else _write
    if not follow:
        for record in read_run(run):
            write(console, record)
        return
    journal = JournalFollower(run)
    try:
        while not _show_new(journal, console, write):
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        pass  # how one leaves it


def _show_new(journal: JournalFollower, console: Console, write: Callable[[Console, Record], None]) -> bool:
    """Whether the run has ended."""
    new = sorted(journal.new(), key=lambda record: (record.attempt, record.time))
    for record in new:
        write(console, record)
    over = False
    for record in new:
        if isinstance(record.event, AttemptStarted):
            over = False
        over |= isinstance(record.event, RunFinished | RunStopped)
    return over


def _fields(record: Record) -> dict[str, Any]:
    fields: dict[str, Any] = from_json(record.event.model_dump_json())
    return fields


def _write_json(console: Console, record: Record) -> None:
    place = {"seq": record.seq, "time": record.time, "attempt": record.attempt, "writer": record.writer}
    say(console, canonical_json(place | _fields(record)).decode())


def _write(console: Console, record: Record) -> None:
    """Without digests and tables: those are for programs."""
    fields = _fields(record)
    name = fields.pop("event")
    plain = [f"{key}={_short(value)}" for key, value in fields.items() if not isinstance(value, dict | list)]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
    say(console, " ".join([at, f"attempt {record.attempt}", record.writer, name, *plain]))
    for line in fields.get("last_lines", []):
        say(console, f"    {line}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show_logs(run: Path, attempt: int | None, console: Console, follow: bool, as_json: bool) -> None:
    """The stream of `attempt`, of the newest if None. `follow`: then what is added to it, and the streams of the
    attempts after it, until the run ends or Ctrl-C.

    Raises:
        ConfigError: there is no such stream.
    """
    known = streams(run)
    number = attempt or max(known, default=0)
    if number not in known:
        raise ConfigError(f"{run}: no logs of attempt {number}" if known else f"{run}: no logs there")
    write = say if as_json else _write_log_line
    journal, ended, stream = JournalFollower(run), False, Tail(stream_path(run / "logs", number))
    try:
        while True:
            ended = not follow or _supervision_ended(journal.new(), ended)
            while (new := stream.new())[1]:
                for line in new[0]:
                    write(console, line.decode())
            later = [other for other in streams(run) if other > number]
            if follow and later:
                number, stream = later[0], Tail(stream_path(run / "logs", later[0]))
            elif ended:
                return
            else:
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        pass  # how one leaves it


def _supervision_ended(new: list[Record], before: bool) -> bool:
    """Whether the run is complete or stopped, and the supervisor has said so: after it, nothing is added to a stream.

    `new`: records since the last call, which said `before`.
    """
    ended = before
    for record in sorted(new, key=lambda record: (record.attempt, record.time)):
        match record.event:
            case AttemptStarted():
                ended = False
            case RunStopped() | AttemptEnded(exit_code=0):
                ended = True
    return ended


def _write_log_line(console: Console, line: str) -> None:
    fields = from_json(line)
    at = time.strftime("%H:%M:%S", time.localtime(fields["time"]))
    console.print(Text.assemble((at, "dim"), " ", (fields["process"], "cyan"), " ", fields["line"]))


def stop_run(run: str, console: Console) -> None:
    """Ask whoever supervises the run to stop, and wait until it has.

    Raises:
        ConfigError: nobody heard it.
    """
    view = RunView(run)
    if (seen := view.look()).state != "running":
        say(console, f"{run}: already {seen.state}")
        return
    grace = recorded_run(Path(run)).config.supervision.grace_seconds + HEARD_WITHIN
    end, request = time.monotonic() + grace, Path(run) / STOP_FILE
    request.touch()
    while request.exists():
        if time.monotonic() > end:
            request.unlink(missing_ok=True)
            raise ConfigError(f"{run}: nothing has stopped within {grace:.0f} s; is its `harness run` still alive?")
        time.sleep(0.1)
    seen = view.look()
    say(console, f"{run}: {seen.state}; newest checkpoint: step {_or_dash(seen.newest_local)}")
    if seen.state != "complete":
        say(console, f"go on: harness resume {run}")


def resume_run(run: Path, console: Console) -> None:
    """Raises ConfigError besides what a run raises: how it was started is not recorded, or from where is gone."""
    recorded = recorded_run(run)
    try:
        os.chdir(recorded.directory)  # where paths in the config begin
    except OSError as error:
        raise ConfigError(f"{run} was started in {recorded.directory}: {error.strerror}; use `harness run`") from error
    start(recorded.config, console)
