"""Generations come back bit for bit or not at all, whatever happened to the file and to the process that wrote it."""

import errno
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import generations
from checkpointing.canonical import digest
from checkpointing.errors import StoreError
from checkpointing.generations import (
    Generation,
    GenerationLog,
    KnownGenerations,
    decode_line,
    delete_generations,
    encode_line,
)

GENERATIONS = st.integers(0, 20).flatmap(
    lambda length: st.builds(
        Generation,
        tokens=st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length),
        logprobs=st.none() | st.lists(st.floats(), min_size=length, max_size=length),
        stop_reason=st.sampled_from(["stop", "length", None]),
        offset=st.integers(0, 2**31),
        text=st.text(st.characters(exclude_categories=["Cs"])),
    )
)


def key(number: int) -> str:
    return digest(str(number).encode())


def generation(number: int) -> Generation:
    return Generation([number, 7], [-1e-300, -0.1 * number], "stop", f"text {number}")


def write(run_dir: Path, step: int, attempt: int, numbers: range) -> Path:
    log = GenerationLog(run_dir, step, attempt)
    for number in numbers:
        log.append(key(number), generation(number))
    log.close()
    return run_dir / "rollouts" / f"{step:010d}-{attempt:06d}.log"


def known(run_dir: Path, numbers: range, step: int = 0) -> set[int]:
    """Which are known; each must be what was written."""
    found = KnownGenerations(run_dir, step)
    answers = {number: found.get(key(number)) for number in numbers}
    assert all(answer in (None, generation(number)) for number, answer in answers.items())
    return {number for number, answer in answers.items() if answer is not None}


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


@given(GENERATIONS)
def test_a_line_gives_back_what_was_written_bit_for_bit(written: Generation) -> None:
    line = encode_line(key(1), written)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    found = decode_line(line)
    assert found is not None
    name, read = found
    assert name == key(1) and read.tokens == written.tokens and read.offset == written.offset
    assert (read.stop_reason, read.text) == (written.stop_reason, written.text)
    assert (read.logprobs is None) == (written.logprobs is None)
    assert bits(read.logprobs or []) == bits(written.logprobs or [])
    assert all(type(token) is int for token in read.tokens)
    assert all(type(value) is float for value in read.logprobs or [])


@pytest.mark.parametrize("value", [-1e-300, -5e-324, -0.0, -0.1, -1.7976931348623157e308, math.pi])
def test_no_digit_of_a_log_probability_is_lost(value: float) -> None:
    found = decode_line(encode_line(key(1), Generation([1], [value], "stop", "")))
    assert found is not None and found[1].logprobs is not None
    assert found[1].logprobs[0].hex() == value.hex()


@given(GENERATIONS, st.data())
def test_a_line_with_any_byte_changed_or_cut_is_no_line(written: Generation, data: st.DataObject) -> None:
    line = encode_line(key(1), written)
    place = data.draw(st.integers(0, len(line) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != line[place]))
    assert decode_line(line[:place] + bytes([other]) + line[place + 1 :]) is None
    assert decode_line(line[:place]) is None
    assert decode_line(line[:-1]) is decode_line(line[:-1] + b" ") is None


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 10_000))
def test_whatever_happens_to_a_file_it_never_lies(damage: list[tuple[int, int]], cut: int) -> None:
    numbers = range(6)
    with TemporaryDirectory() as name:
        path = write(Path(name), 0, 1, numbers)
        content = bytearray(path.read_bytes())
        for place, value in damage:
            content[place % len(content)] = value
        path.write_bytes(content[: cut if cut < len(content) else None])
        known(Path(name), numbers)  # which asserts that what is found is right


def test_a_torn_last_line_and_a_damaged_one_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 1, range(5))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"stop", b"stoq")
    lines[4] = lines[4][:-3]
    path.write_bytes(b"".join(lines))
    assert known(tmp_path, range(5)) == {0, 2, 3}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"null",
        b"no JSON",
        encode_line(key(1), generation(1))[65:-1].replace(b'"tokens":"', b'"tokens":"A'),
        encode_line(key(1), generation(1))[65:-1].replace(b'"logprobs":"', b'"logprobs":7,"x":"'),
    ],
)
def test_a_line_that_is_whole_and_holds_no_generation_is_passed_over(tmp_path: Path, body: bytes) -> None:
    path = write(tmp_path, 0, 1, range(1))
    path.write_bytes(digest(body).encode() + b" " + body + b"\n" + path.read_bytes())
    assert known(tmp_path, range(2)) == {0}


def test_what_is_damaged_after_it_was_found_is_not_returned(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 1, range(2))
    found = KnownGenerations(tmp_path, 0)
    path.write_bytes(path.read_bytes().replace(b"text 1", b"text 0"))
    assert found.get(key(0)) == generation(0) and found.get(key(1)) is None
    path.write_bytes(encode_line(key(5), generation(0)))
    assert found.get(key(0)) is None, "a whole line, but of another request"
    path.unlink()
    assert found.get(key(0)) is None


def test_attempts_add_up_and_steps_before_the_one_resumed_from_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, 3, 1, range(2))
    write(tmp_path, 4, 1, range(2, 4))
    write(tmp_path, 4, 2, range(4, 6))
    write(tmp_path, 5, 2, range(6, 8))
    assert known(tmp_path, range(8), step=4) == {2, 3, 4, 5, 6, 7}


def test_a_file_that_is_opened_again_is_added_to(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, range(2))
    write(tmp_path, 0, 1, range(2, 4))
    assert known(tmp_path, range(4)) == {0, 1, 2, 3}


def test_deleting_goes_by_the_step_and_can_be_repeated(tmp_path: Path) -> None:
    paths = [write(tmp_path, step, attempt, range(1)) for step in (8, 9, 10) for attempt in (1, 2)]
    (tmp_path / "rollouts" / "notes.txt").touch()
    paths[0].unlink()  # a deletion that was killed
    delete_generations(tmp_path, before=10)
    delete_generations(tmp_path, before=10)
    assert [path.exists() for path in paths] == [False] * 4 + [True] * 2
    delete_generations(tmp_path)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["notes.txt"]
    delete_generations(tmp_path / "never made")


def piece(offset: int, *tokens: int, scored: bool = True) -> Generation:
    return Generation(list(tokens), [-token / 3 for token in tokens] if scored else None, None, "", offset)


def test_pieces_are_put_together_from_the_first_token_on(tmp_path: Path) -> None:
    for attempt, pieces in enumerate(([piece(0, 1, 2), piece(2, 3)], [piece(3, 4, 5), piece(7, 8)]), start=1):
        log = GenerationLog(tmp_path, 0, attempt)
        for part in pieces:
            log.append(key(1), part)
        log.append(key(2), piece(attempt, 9))
        log.close()
    found = KnownGenerations(tmp_path, 0)
    assert found.get(key(1)) is None, "a piece is no answer"
    assert found.beginning(key(1)) == piece(0, 1, 2, 3, 4, 5), "up to the gap"
    assert found.beginning(key(2)).tokens == [] and found.beginning(key(3)).tokens == []


def test_pieces_without_log_probabilities_empty_and_damaged_ones(tmp_path: Path) -> None:
    log = GenerationLog(tmp_path, 0, 1)
    for part in (piece(0, 1, scored=False), piece(1), piece(1, 2, scored=False), piece(2, 3, scored=False)):
        log.append(key(1), part)
    log.close()
    path = tmp_path / "rollouts" / "0000000000-000001.log"
    assert KnownGenerations(tmp_path, 0).beginning(key(1)) == Generation([1, 2, 3], None, None, "")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b":1", b":2"), lines[3]]))
    assert KnownGenerations(tmp_path, 0).beginning(key(1)) == Generation([1], None, None, "")


def test_a_run_without_any(tmp_path: Path) -> None:
    assert KnownGenerations(tmp_path, 0).get(key(1)) is None


def test_what_was_appended_survives_the_death_of_the_process_at_once(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from checkpointing.generations import Generation, GenerationLog
from tests.unit.test_generations import generation, key
log = GenerationLog(Path(sys.argv[1]), 0, 1)
for number in range(40):
    log.append(key(number), generation(number))
os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert died.returncode == -9
    assert known(tmp_path, range(50)) == set(range(40))


def test_fsyncs_are_few_and_the_last_append_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    fsync = os.fsync

    def counted(fd: int) -> None:
        if os.fstat(fd).st_mode & 0o100000:  # a file, not a folder
            sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(generations, "SYNC_SECONDS", 3600.0)
    monkeypatch.setattr(os, "fsync", counted)
    path = write(tmp_path, 0, 1, range(500))
    assert 1 <= len(sizes) <= 2 and sizes[-1] == path.stat().st_size


def test_storage_that_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = GenerationLog(tmp_path, 0, 1)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(generations, "write_all", full)
        with pytest.raises(StoreError, match="free some space"):
            log.append(key(1), generation(1))
    log.close()
