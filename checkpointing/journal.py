"""Journal: what happened in a run, as append-only typed events. Times, lost work and verdicts are derived from it.

Each writer has its own file for each attempt, `journal/<writer>-<attempt>.jsonl`, so nothing needs a lock. A line is a
JSON object: the event's own fields with `seq` (0, 1, ... within the file), `time` (Unix seconds), `attempt`, `writer`.
A line counts once it ends in a newline; a last line without one was never acknowledged.
"""

import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from checkpointing.canonical import canonical_json
from checkpointing.disk import explained, fsync_dir, make_folder, write_all
from checkpointing.errors import FormatError, StoreError
from checkpointing.events import AttemptEnded, Event

_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
_FILE_NAME = re.compile(r"([a-z][a-z0-9_]*)-([0-9]{6,})\.jsonl")


class Record(NamedTuple):
    seq: int
    time: float
    attempt: int
    writer: str
    event: Event


class Journal:
    """One writer's journal of one attempt. Opening it again continues it, without the torn last line of a crash.

    `writer` is a name such as "driver" or "supervisor"; only one process may have it at a time.

    Raises:
        StoreError: storage refused.
    """

    def __init__(self, run_dir: Path, writer: str, attempt: int) -> None:
        name = f"{writer}-{attempt:06d}.jsonl"
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"journal writer {writer!r} of attempt {attempt}: use a-z, 0-9 and '_'")
        self._path, self._writer, self._attempt = run_dir / "journal" / name, writer, attempt
        self._lock = threading.Lock()  # a save commits in a thread of its own
        with explained(f"open {self._path}"):
            make_folder(self._path.parent)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            whole = self._path.read_bytes()
            self._end = whole.rfind(b"\n") + 1
            self._seq = whole.count(b"\n")
            os.ftruncate(self._fd, self._end)
            fsync_dir(self._path.parent)

    def append(self, event: Event) -> None:
        """Add one event, durably: when this returns it survives a power cut, if it raises it is not in the journal.

        Raises:
            StoreError: storage refused.
        """
        with self._lock:
            if self._fd < 0:  # its number may be another file's by now
                raise StoreError(f"append to {self._path}: this journal is closed, its attempt is over")
            place = {"seq": self._seq, "time": time.time(), "attempt": self._attempt, "writer": self._writer}
            line = canonical_json(place | from_json(event.model_dump_json())) + b"\n"
            with explained(f"append to {self._path}"):
                try:
                    write_all(self._fd, line)
                    os.fsync(self._fd)
                except OSError:
                    # Half a line must not stay, or the next one would be glued to it. Shrinking needs no space.
                    os.ftruncate(self._fd, self._end)
                    raise
            self._seq += 1
            self._end += len(line)

    def close(self) -> None:
        """What a thread that comes later would add is an error of storage."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def read_journal(run_dir: Path) -> list[Record]:
    """Every event of the run, in one order: by attempt, and within an attempt by time.

    Each writer's own order is kept even if the clock was set back. `AttemptEnded`, and what its writer adds after it,
    comes after everything else of its attempt: the supervisor says it when the other writers are dead, whatever their
    clocks said. [] if there is no journal.

    Raises:
        FormatError: a line is not an event, or one is missing; names file and line. A torn last line is passed over.
        StoreError: storage refused.
    """
    ordered = []
    for path in sorted((run_dir / "journal").glob("*.jsonl")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            continue
        latest, ended = 0.0, False
        for record in _read_file(path, writer=match[1], attempt=int(match[2])):
            latest = max(latest, record.time)
            ended = ended or isinstance(record.event, AttemptEnded)
            ordered.append(((record.attempt, ended, latest, record.writer, record.seq), record))
    return [record for _, record in sorted(ordered, key=lambda pair: pair[0])]


class JournalFollower:
    """Reads a growing journal piece by piece: each event once, at a cost that does not grow with the run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "journal"
        self._read: dict[Path, tuple[int, int]] = {}  # {file: (bytes, lines) read so far}

    def new(self) -> list[Record]:
        """Events added since the last call, in order within each file. Raises like `read_journal`."""
        added = []
        for path in sorted(self._folder.glob("*.jsonl")):
            match = _FILE_NAME.fullmatch(path.name)
            if match is None:
                continue
            offset, seq = self._read.get(path, (0, 0))
            with explained(f"read {path}"), path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            for line in whole.split(b"\n")[:-1]:
                added.append(_parse(line, f"{path}:{seq + 1}", (seq, int(match[2]), match[1])))
                seq += 1
            self._read[path] = (offset + len(whole), seq)
        return added


def _read_file(path: Path, writer: str, attempt: int) -> list[Record]:
    with explained(f"read {path}"):
        lines = path.read_bytes().split(b"\n")[:-1]
    return [_parse(line, f"{path}:{seq + 1}", (seq, attempt, writer)) for seq, line in enumerate(lines)]


def _parse(line: bytes, where: str, place: tuple[int, int, str]) -> Record:
    try:
        fields = from_json(line)
        found = (fields.pop("seq"), fields.pop("attempt"), fields.pop("writer"))
        moment = float(fields.pop("time"))
        event = _EVENT.validate_python(fields)
    except ValidationError as error:
        raise FormatError(f"{where}: {error.errors(include_url=False)[0]['msg']}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{where}: not a line of a journal: {error!r}") from error
    if found != place:
        raise FormatError(f"{where}: (seq, attempt, writer) is {found}, {place} expected: lines were lost or mixed up")
    return Record(place[0], moment, place[1], place[2], event)
