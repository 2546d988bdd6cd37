"""`harness drill --index`: everything is run whatever fails, and the page says of each drill what became of it."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaos.judgement import Judgement, Reason
from chaos.report.index import Row, overall, render_index
from checkpointing.errors import ConfigError, HarnessError, Preempted
from harness import drill
from harness.drill import drilled
from harness.drill_index import drill_all, drill_files
from harness.engines import EnginePool
from harness.results import DrillResult, nothing_proved

QUIET = Console(quiet=True)
NASTY = "<script>alert(1)</script>"


def result(path: Path, outcome: Any, folder: Path | None = None, **rest: Any) -> DrillResult:
    reasons = (Reason(name="why", text=f"{outcome} {NASTY}"),)
    judgement = {
        "passed": Judgement(outcome="passed"),
        "failed": Judgement(outcome="failed", failures=reasons),
        "inconclusive": Judgement(outcome="inconclusive", doubts=reasons),
    }[outcome]
    return DrillResult(
        drill=str(path),
        command=f"harness drill {path}",
        judgement=judgement,
        versions={"ray": "2"},
        commit="c" * 40,
        directory=str(folder) if folder else None,
        seconds=61.0,
        **rest,
    )


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    for name in ("a", "deep/b", "deep/er/c", "d"):
        path = tmp_path / "drills" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# What {path.stem} breaks.\nrun: r\n")
    (tmp_path / "drills" / "readme.md").touch()
    return drill_files([tmp_path / "drills"])


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "index.json").read_text())
    return found


def test_folders_stand_for_the_drills_below_them(paths: list[Path], tmp_path: Path) -> None:
    assert [path.stem for path in paths] == ["a", "d", "b", "c"]
    assert drill_files([paths[2], tmp_path / "absent.yaml"]) == [paths[2], tmp_path / "absent.yaml"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no drill"):
        drill_files([tmp_path / "empty"])


def test_an_index_of_all(paths: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "all"
    made = [
        result(paths[0], "passed", tmp_path / "runs" / "a-now", seed=7),
        result(paths[1], "failed", tmp_path / "runs" / "d-now"),
        result(paths[2], "inconclusive"),
        nothing_proved(paths[3], "unavailable", ConfigError("needs a Kubernetes cluster")),
    ]
    assert drill_all(paths, made, folder, tmp_path / "junit.xml", QUIET) == 20
    index = index_of(folder)
    assert (index["outcome"], index["planned"]) == ("failed", 4)
    assert [one["outcome"] for one in index["drills"]] == ["passed", "failed", "inconclusive", "unavailable"]
    first = index["drills"][0]
    assert (first["report"], first["seed"], first["what"]) == ("../a-now/report.html", 7, "What a breaks.")
    assert first["result"]["versions"] == {"ray": "2"}
    page = (folder / "index.html").read_text()
    assert 'href="../d-now/report.html"' in page and "seed 7" in page and "1 min 1 s" in page
    assert "needs a Kubernetes cluster" in page and f"harness drill {paths[0]}" in page
    assert (tmp_path / "junit.xml").exists()


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img")
        self.found += [pair for pair in attrs if pair[0] in ("src", "href")]


def test_the_page_needs_nothing_but_itself_and_executes_nothing() -> None:
    row = Row(NASTY, NASTY, "failed", [NASTY], 1.0, NASTY, report="r/report.html")
    page = render_index([row], 2, "now", {NASTY: NASTY}, NASTY)
    links = Links()
    links.feed(page)
    assert links.found == [("href", "r/report.html")]
    assert "default-src 'none'" in page and "1 of 2 drills have not been run yet" in page


@pytest.mark.parametrize(
    ("outcomes", "missing", "outcome"),
    [
        (["passed", "passed"], 0, "passed"),
        (["passed", "unavailable"], 0, "passed"),
        (["passed", "inconclusive"], 0, "inconclusive"),
        (["passed"], 1, "inconclusive"),
        (["inconclusive", "failed", "passed"], 1, "failed"),
        (["unavailable"], 0, "inconclusive"),
        ([], 0, "inconclusive"),
    ],
)
def test_what_all_of_them_come_to(outcomes: list[str], missing: int, outcome: str) -> None:
    assert overall(outcomes, len(outcomes) + missing) == outcome


def test_who_stops_it_has_what_was_done(paths: list[Path], tmp_path: Path) -> None:
    def stopped() -> Iterator[DrillResult]:
        yield result(paths[0], "passed")
        raise Preempted("stopped as asked")

    with pytest.raises(Preempted):
        drill_all(paths, stopped(), tmp_path / "all", None, QUIET)
    index = index_of(tmp_path / "all")
    assert (index["outcome"], index["planned"], len(index["drills"])) == ("inconclusive", 4, 1)
    assert "3 of 4 drills have not been run yet" in (tmp_path / "all" / "index.html").read_text()


class FakeExercise:
    """Stands in for a drill that is run: its name says what becomes of it."""

    config = None

    def __init__(self, path: Path, *_: object) -> None:
        self.path = path
        if path.stem == "wrong":
            raise ConfigError("wrong: unknown key")

    def prepare(self, engines: EnginePool) -> None:
        if self.path.stem == "broken":
            raise HarnessError("no baseline")

    def seed(self, given: int | None) -> None:
        return None

    def schedule(self, seed: int | None) -> tuple[()]:
        if self.path.stem == "bug":
            raise KeyError("ours")
        return ()

    def meet(self, planned: tuple[()], seed: int | None) -> DrillResult:
        if self.path.stem == "stop":
            raise Preempted("stopped as asked")
        return result(self.path, "passed")


class NoEngines:
    def __init__(self, *_: object) -> None:
        """Nothing is started."""

    def __enter__(self) -> "NoEngines":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is ended."""


def test_what_can_not_be_run_keeps_no_other_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "Exercise", FakeExercise)
    monkeypatch.setattr(drill, "EnginePool", NoEngines)
    monkeypatch.setattr(drill, "engine_settings", lambda config: "")
    paths = [Path(f"{name}.yaml") for name in ("one", "wrong", "broken", "bug", "two")]
    made = {one.drill: one.judgement for one in drilled(paths, QUIET, keep_going=True)}
    assert len(made) == 5
    assert [name for name, judgement in made.items() if judgement.outcome == "passed"] == ["one.yaml", "two.yaml"]
    doubts = {name: str(judgement.doubts[0]) for name, judgement in made.items() if judgement.doubts}
    assert doubts == {
        "wrong.yaml": "not run: wrong: unknown key",
        "broken.yaml": "not run: no baseline",
        "bug.yaml": "not run: 'ours'",
    }
    with pytest.raises(ConfigError):
        list(drilled(paths, QUIET))
    with pytest.raises(Preempted):
        list(drilled([Path("stop.yaml"), Path("one.yaml")], QUIET, keep_going=True))
