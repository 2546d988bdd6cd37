"""One stream of lines per attempt: what its driver, its ranks, Ray and the engines say, each line with who said it.

`logs/attempt-NNNNNN.jsonl` of the run directory, NNNNNN being the number that the driver process began with:

    time     Unix seconds, when the line was copied, at most about a second after it was said
    attempt  the number
    process  driver, engine-0, "policy rank 1 (pid 4711)", "Keeper (pid 4712)", raylet, gcs_server, ...
    line     without its newline, colours and secrets (redaction.py), and cut after `MAX_LINE` characters

The supervisor copies what is new each time it looks, and blots secrets out of what it has copied: until then they are
in the files that processes write to by themselves. Those stay, but for Ray's, which go with the attempt. With a Ray
cluster that is not ours, workers' lines come through the driver's log.
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from checkpointing.canonical import canonical_json
from checkpointing.disk import write_all
from checkpointing.redaction import Redact, redactor
from harness.processes import scratch_of

MAX_LINE = 4000
"""Characters."""
PIECE = 64 * 1024
"""Bytes that are read of one file at a time; of a longer line only so much is looked at."""
PER_LOOK = 256 * 1024
"""Bytes that are read in one look. What is more waits for the next; the last look reads everything."""

LATELY = 16 * PER_LOOK
"""Bytes of each file that a supervisor that begins looks through for what one that was killed had not come to."""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAY_LOG = re.compile(
    r"worker-[0-9a-f]+-[0-9a-f]+-(?P<pid>\d+)\.(?:out|err)|(?P<daemon>raylet|gcs_server)\.(?:out|err)"
)
_RAY_HEADER = re.compile(r":(?:job_id|actor_name|task_name):_?(?P<name>.*)")
_RAY_TROUBLE = re.compile(r"\[[^\]]* [EFC] \d+ \d+\]")
"""What Ray's daemons log as an error or worse; the rest is chatter."""
_RANKS_LOG = re.compile(r"ranks-[0-9]+-[0-9]+(?:-(?P<role>[a-z]+)-(?P<rank>\d+)-(?P<pid>\d+))?\.log")

_log = logging.getLogger(__name__)


class Tail:
    """Reads a growing file from `offset` on, line by line. A file that has shrunk is read anew.

    With `redact`, what is read is blotted: where it has secrets, the file is overwritten.
    """

    def __init__(self, path: Path, offset: int = 0, redact: Redact | None = None) -> None:
        self.path, self._offset, self._redact = path, offset, redact
        self._seen = -1
        """Its size when there was no whole line left to read."""
        self._in_long_line = False

    def new(self, last: bool = False) -> tuple[list[bytes], int]:
        """Lines that were ended since, from at most `PIECE` bytes, and how many bytes were read.

        `last`: nothing will be added to the file, so its last line has ended. Raises OSError.
        """
        size = _size(self.path)
        if size < self._offset:
            self._offset, self._in_long_line = 0, False
        if size == self._offset or (size == self._seen and not last):
            return [], 0
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(PIECE)
        end = data.rfind(b"\n") + 1
        reached_end = self._offset + len(data) >= size
        if end == 0 and len(data) == PIECE:
            lines, end, ends_inside = [data], PIECE, True
        elif last and reached_end:
            lines, end, ends_inside = data.removesuffix(b"\n").split(b"\n"), len(data), False
        else:
            lines, ends_inside = data[:end].split(b"\n")[:-1], self._in_long_line and end == 0
        if self._in_long_line:
            lines = lines[1:]  # the rest of one that was cut
        self._in_long_line = ends_inside
        if self._redact is not None:
            blot(self.path, self._offset, data[:end], self._redact)
        self._offset += end
        self._seen = size if reached_end else -1
        return lines, len(data)


def blot(path: Path, offset: int, data: bytes, redact: Redact) -> None:
    """Overwrite lines of `data`, which `path` holds at `offset`, that have secrets, by as many bytes without them.

    Others may append to the file meanwhile. Raises OSError.
    """
    if redact(text := data.decode(errors="replace")) == text:
        return
    with path.open("r+b") as file:
        for line in data.split(b"\n"):
            text = line.decode(errors="replace")
            if (clean := redact(text)) != text:
                os.pwrite(file.fileno(), clean.encode()[: len(line)].ljust(len(line)), offset)
            offset += len(line) + 1


class LogStream:
    """Copies lines into the stream of the attempt that was begun last. What fails is said: no run ends for its logs."""

    def __init__(self, logs: Path, engines: list[Path], ledger: Path) -> None:
        """`engines`: their logs, whether there yet or not. `ledger`: knows the driver's session."""
        self._logs, self._ledger = logs, ledger
        self._redact = redactor()
        # What was there before this supervisor belongs to attempts that it did not see.
        self._engines = {path: Tail(path, _size(path), self._redact) for path in engines}
        for path in {*engines, *logs.glob("*.log")}:
            self._blot_lately(path)
        self._stream: int | None = None
        self._attempt = 0
        self._tails: dict[Path, Tail] = {}
        self._listed: dict[Path, set[str]] = {}
        """{folder: names in it when it was last looked at}"""
        self._names: dict[str, str] = {}
        """{pid: who that is}"""
        self._scratch: Path | None = None
        self._said_unlisted = False

    def begin(self, attempt: int) -> None:
        """Call before the driver starts."""
        self._close()
        self._attempt = attempt
        self._tails, self._listed, self._names, self._scratch = {}, {}, {}, None
        driver, path = self._logs / f"attempt-{attempt:06d}.log", stream_path(self._logs, attempt)
        try:
            self._tails = {driver: Tail(driver, _size(driver), self._redact)} | self._engines
            self._listed = {self._logs: _names_in(self._logs)}
            self._logs.mkdir(parents=True, exist_ok=True)
            self._stream = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            # A supervisor that was killed may have left half a line.
            start = max(0, (size := _size(path)) - PIECE)
            os.ftruncate(self._stream, start + os.pread(self._stream, size - start, start).rfind(b"\n") + 1)
        except OSError as error:
            self._give_up(error)

    def look(self) -> None:
        """Copy what is new."""
        self._try_to_find()
        left = PER_LOOK
        for path in list(self._tails):
            if left > 0 and self._stream is not None:
                # Whoever is read stands last next time: one that talks a lot leaves room for the others.
                self._tails[path] = self._tails.pop(path)
                left -= self._copy(path)

    def end(self) -> None:
        """Copy all that is left, when every process has ended and their files are still there."""
        self._try_to_find()
        for path in list(self._tails):
            while self._stream is not None and self._copy(path, last=path not in self._engines):
                pass
        self._close()

    def _try_to_find(self) -> None:
        try:
            self._find()
        except OSError as error:
            if not self._said_unlisted:
                _log.warning("attempt %d: logs that are new can't be found: %s", self._attempt, error)
            self._said_unlisted = True

    def _find(self) -> None:
        """Logs that have come into being: of ranks beside the driver's, of Ray in the session's temporary files."""
        if self._scratch is None and self._ledger.exists():
            self._scratch = scratch_of(self._ledger)
        folders = [self._logs]
        if self._scratch is not None:
            folders += self._scratch.glob("session_[0-9]*/logs")  # `session_latest` is one of them again
        for folder in folders:
            names, before = _names_in(folder), self._listed.get(folder, set())
            self._listed[folder] = names
            for name in names - before:
                if _RANKS_LOG.fullmatch(name) or _RAY_LOG.fullmatch(name):
                    self._tails[folder / name] = Tail(folder / name, redact=self._redact)

    def _blot_lately(self, path: Path) -> None:
        size = _size(path)
        tail = Tail(path, max(0, size - LATELY), self._redact)
        try:
            while tail.new(last=True)[1]:
                pass
        except OSError as error:
            _log.warning("%s: secrets in it can't be blotted out: %s", path, error)

    def _copy(self, path: Path, last: bool = False) -> int:
        """Copy a piece of what is new in `path`. Returns how many bytes were read."""
        try:
            lines, count = self._tails[path].new(last)
        except OSError as error:
            del self._tails[path]
            self._write(path.name, [f"can't be read further: {error.strerror}".encode()])
            return 0
        match = _RAY_LOG.fullmatch(path.name)
        if match is not None:
            lines = list(self._of_ray(lines, path, match))
        if lines:
            self._write(self._name(path), lines)
        return count

    def _of_ray(self, lines: list[bytes], path: Path, match: re.Match[str]) -> Iterator[bytes]:
        """`lines` without headers, which say what a worker is, and without the daemons' chatter."""
        for line in lines:
            text = line.decode(errors="replace")
            header = _RAY_HEADER.fullmatch(text)
            if match["daemon"] and path.suffix == ".out" and not _RAY_TROUBLE.match(text):
                continue
            if match["pid"] and header is not None:
                if text.startswith(":actor_name:"):
                    self._names.setdefault(match["pid"], header["name"])
                continue
            yield line

    def _name(self, path: Path) -> str:
        if (ranks := _RANKS_LOG.fullmatch(path.name)) is not None:
            if ranks["pid"] is None:
                return "skyrl"
            self._names[ranks["pid"]] = f"{ranks['role']} rank {ranks['rank']}"
            return f"{self._names[ranks['pid']]} (pid {ranks['pid']})"
        if (ray := _RAY_LOG.fullmatch(path.name)) is not None:
            return ray["daemon"] or f"{self._names.get(ray['pid'], 'worker')} (pid {ray['pid']})"
        return "driver" if path.name.startswith("attempt-") else path.stem

    def _write(self, process: str, lines: list[bytes]) -> None:
        place = {"time": round(time.time(), 3), "attempt": self._attempt, "process": process}
        plain = [text for line in lines if (text := self._plain(line)).strip()]
        data = b"".join(canonical_json(place | {"line": text}) + b"\n" for text in plain)
        try:
            if self._stream is not None:
                write_all(self._stream, data)
        except OSError as error:
            self._give_up(error)

    def _plain(self, line: bytes) -> str:
        # A progress bar returns to the start of its line again and again: what a terminal would show is the last.
        text = _COLOURS.sub("", line.decode(errors="replace")).rstrip("\r").rpartition("\r")[2]
        text = self._redact(text)
        return text if len(text) <= MAX_LINE else text[:MAX_LINE] + " [cut]"

    def _give_up(self, error: OSError) -> None:
        _log.warning("attempt %d: its lines are no longer gathered in one stream: %s", self._attempt, error)
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None


def stream_path(logs: Path, attempt: int) -> Path:
    return logs / f"attempt-{attempt:06d}.jsonl"


def streams(run: Path) -> list[int]:
    """The attempts that have a stream, in order."""
    return sorted(int(path.stem.removeprefix("attempt-")) for path in (run / "logs").glob("attempt-*.jsonl"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _names_in(folder: Path) -> set[str]:
    """Not as paths: a folder holds hundreds of files that are looked through twice a second."""
    return set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208
