"""Finished generations on disk: append-only, each under a key that is the digest of everything that determines it.

`<run dir>/rollouts/<step, 10 digits>-<attempt, 6 digits>.log` holds what one attempt generated with the weights of
after `step` (0: of before any training). A line is `<check> <body>` and a newline. `check` is the digest of `body`,
which is canonical JSON:

    key          digest, 64 hex digits
    offset       tokens before those of this line; 0 unless it is a piece
    tokens       token ids, int32 little endian, base64
    logprobs     one per token, float64 little endian, base64; null if they were not asked for
    stop_reason  why it ended; null for a piece of what was not finished when the line was written
    text         all tokens decoded; empty for a piece

This is a cache. A line that is torn or damaged, a file that can't be read: what they held is generated again.
"""

import base64
import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from checkpointing.canonical import canonical_json, digest
from checkpointing.disk import explained, fsync_dir, make_folder, write_all

SYNC_SECONDS = 0.25
"""At least between two fsyncs of a file."""

_FILE_NAME = re.compile(r"([0-9]{10,})-([0-9]{6,})\.log")
_CHECK = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generation:
    """What an engine answered to one request, or a piece of it: `stop_reason` None, tokens from `offset` on.

    `logprobs` come back bit for bit.
    """

    tokens: list[int]
    logprobs: list[float] | None
    stop_reason: str | None
    text: str
    offset: int = 0


def encode_line(key: str, generation: Generation) -> bytes:
    body = canonical_json(
        {
            "key": key,
            "offset": generation.offset,
            "tokens": _packed(generation.tokens, "<i4"),
            "logprobs": None if generation.logprobs is None else _packed(generation.logprobs, "<f8"),
            "stop_reason": generation.stop_reason,
            "text": generation.text,
        }
    )
    return digest(body).encode() + b" " + body + b"\n"


def decode_line(line: bytes) -> tuple[str, Generation] | None:
    """(key, generation); None if `line` is not whole, newline included."""
    body = line[_CHECK + 1 : -1]
    if line[:_CHECK] != digest(body).encode() or line[_CHECK : _CHECK + 1] != b" " or line[-1:] != b"\n":
        return None
    try:
        fields = from_json(body)
        logprobs = fields["logprobs"]
        generation = Generation(
            tokens=_unpacked(fields["tokens"], "<i4"),
            logprobs=None if logprobs is None else _unpacked(logprobs, "<f8"),
            stop_reason=fields["stop_reason"],
            text=fields["text"],
            offset=fields["offset"],
        )
        return str(fields["key"]), generation
    except (ValueError, TypeError, KeyError):  # another version's, or made by hand
        return None


def _packed(values: list[int] | list[float], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def _unpacked(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


class GenerationLog:
    """What one attempt generates with the weights of after `step`.

    What `append` has returned for survives the death of this process. A power cut takes what is younger than
    `SYNC_SECONDS` and one fsync, which a thread of its own does.

    Raises:
        StoreError: storage refused.
    """

    def __init__(self, run_dir: Path, step: int, attempt: int) -> None:
        self.step = step
        self._path = run_dir / "rollouts" / f"{step:010d}-{attempt:06d}.log"
        self._unsynced, self._closing = threading.Event(), threading.Event()
        with explained(f"open {self._path}"):
            make_folder(self._path.parent)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            fsync_dir(self._path.parent)
        self._thread = threading.Thread(target=self._sync, name="rollouts-sync", daemon=True)
        self._thread.start()

    def append(self, key: str, generation: Generation) -> None:
        """Raises StoreError: storage refused. Only `close` may follow: half a line may have been written."""
        with explained(f"append to {self._path}"):
            write_all(self._fd, encode_line(key, generation))
        self._unsynced.set()

    def close(self) -> None:
        self._closing.set()
        self._unsynced.set()
        self._thread.join()
        os.close(self._fd)

    def _sync(self) -> None:
        last = False
        while not last:
            self._unsynced.wait()
            self._unsynced.clear()
            last = self._closing.is_set()  # asked before the fsync: nothing is appended once it is set
            try:
                os.fsync(self._fd)
            except OSError as error:
                _log.warning("%s: what was generated may not survive a power cut: %s", self._path, error)
            self._closing.wait(SYNC_SECONDS)


class _Place(NamedTuple):
    path: Path
    offset: int
    size: int


class KnownGenerations:
    """What was generated with the weights of after `step` or any later one, by attempts that have ended.

    Only keys and places are held in memory.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self._places: dict[str, _Place] = {}
        self._pieces: dict[str, dict[int, _Place]] = {}
        for of_step, path in _files(run_dir):
            if of_step >= step:
                self._scan(path)

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Generation | None:
        """The finished one."""
        place = self._places.get(key)
        return None if place is None else self._read(key, place)

    def beginning(self, key: str) -> Generation:
        """As much as there is, from the first token on, of one that was not finished; maybe nothing."""
        tokens: list[int] = []
        logprobs: list[float] | None = None
        pieces = self._pieces.get(key, {})
        while (place := pieces.get(len(tokens))) is not None and (piece := self._read(key, place)) is not None:
            tokens += piece.tokens
            logprobs = None if piece.logprobs is None else (logprobs or []) + piece.logprobs
        return Generation(tokens, logprobs, None, "")

    def _read(self, key: str, place: _Place) -> Generation | None:
        try:
            with place.path.open("rb") as file:
                file.seek(place.offset)
                found = decode_line(file.read(place.size))
        except OSError as error:
            _log.warning("%s can't be read (%s); what it holds is generated again", place.path, error)
            return None
        return found[1] if found is not None and found[0] == key else None

    def _note(self, key: str, generation: Generation, place: _Place) -> None:
        if generation.stop_reason is not None:
            self._places[key] = place
        elif generation.tokens:
            self._pieces.setdefault(key, {})[generation.offset] = place

    def _scan(self, path: Path) -> None:
        damaged, offset = 0, 0
        try:
            with path.open("rb") as file:
                for line in file:
                    found = decode_line(line)
                    if found is not None:
                        self._note(*found, _Place(path, offset, len(line)))
                    elif line.endswith(b"\n"):
                        damaged += 1
                    offset += len(line)
        except OSError as error:
            _log.warning("%s can't be read (%s); what it holds is generated again", path, error)
        if damaged:
            _log.warning("%s: %d damaged lines; what they held is generated again", path, damaged)


def delete_generations(run_dir: Path, before: int | None = None) -> None:
    """Delete what was generated with the weights of steps less than `before`, or everything.

    May be killed anywhere and called again: what was deleted is no longer needed, what was not is deleted next time.

    Raises:
        StoreError: storage refused.
    """
    for step, path in _files(run_dir):
        if before is None or step < before:
            with explained(f"delete {path}"):
                path.unlink(missing_ok=True)


def _files(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, file), in order of step and attempt."""
    found = []
    for path in (run_dir / "rollouts").glob("*.log"):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None:
            found.append(((int(match[1]), int(match[2])), path))
    return [(step, path) for (step, _), path in sorted(found)]
