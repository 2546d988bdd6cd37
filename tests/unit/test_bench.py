"""The benchmarks run, and say what they are to say. How fast anything is, is no matter of tests."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.footprint import lora
from benchmarks.profile import Profile
from benchmarks.report import Figure, alternate, machine, write
from benchmarks.stop import stop
from benchmarks.storage import commit

KEYS = {"row", "figure", "target", "verdict", "unit", "note", "ratio", "min", "max", "ours", "theirs", "repetitions"}


@pytest.mark.parametrize("row", [stop, commit, lora])
def test_a_quick_row_gives_figures(row: Callable[[Profile], Iterator[Figure]], tmp_path: Path) -> None:
    figures = [figure.as_dict() for figure in row(Profile(8 << 20, "bfloat16", 2, tmp_path, 2, 2))]
    assert figures and any(figure["target"] for figure in figures)
    for figure in figures:
        assert figure.keys() == KEYS
        assert figure["row"] == row.__name__ and figure["verdict"] in ("met", "missed", "-")
        assert 0 < figure["min"] <= figure["ratio"] <= figure["max"]
        assert figure["ours"] > 0 and figure["theirs"] > 0
    if row is lora:
        assert figures[0]["min"] > 1  # every byte was written: no rank holds what another does
    assert not list(tmp_path.iterdir())  # what was written for it is gone


def test_each_side_is_as_often_first() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    ours, theirs = alternate(4, lambda: side("a"), lambda: side("b"))
    assert "".join(order) == "abbaabba"
    assert (ours, theirs) == ([1.0, 4.0, 5.0, 8.0], [2.0, 3.0, 6.0, 7.0])


def test_a_miss_is_called_one_and_shows_its_times(tmp_path: Path) -> None:
    figures = [
        Figure("commit", "commit / write", 1.25, [3.0, 2.0, 4.0], [2.0, 2.0, 2.0]),
        Figure("stop", "stop / copy", 1.3, [1.3], [1.0]),
        Figure("upload", "upload / sockets", 1.1, [], []),
    ]
    profile: dict[str, Any] = {"size": "1MiB", "dtype": "fp32", "ranks": 2, "only": []}
    table = write(tmp_path, profile, machine(tmp_path), figures)
    assert "| commit / write | 1.25 | 1.500 | 1.000..2.000 | **missed** | 3 s / 2 s |" in table
    assert "| stop / copy | 1.3 | 1.300 | 1.300..1.300 | met |" in table
    assert "| upload / sockets | 1.1 | | | not measured | |" in table
    (record,) = [json.loads(path.read_text()) for path in tmp_path.glob("*-1MiB-fp32.json")]
    assert [figure["verdict"] for figure in record["figures"]] == ["missed", "met", "not measured"]
    assert {"cores", "memory_gib", "file_system", "kernel", "packages", "commit"} <= record["machine"].keys()
