"""`harness drill --index`: every drill, whatever becomes of the others, and a page that shows them all."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from chaos.report.index import Outcome, Row, overall, render_index
from checkpointing.disk import explained
from checkpointing.errors import VERIFY_CANNOT_TELL, VERIFY_DIFFERENT, ConfigError
from harness.junit import write_junit
from harness.output import say
from harness.results import DrillResult, versions_shown
from trainer.provenance import commit

_CODES = {"passed": 0, "failed": VERIFY_DIFFERENT, "inconclusive": VERIFY_CANNOT_TELL}


def drill_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths`, and those below its folders. Raises ConfigError: a folder has none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path}: there is no drill (*.yaml) in that folder")
        found += inside
    return found


def drill_all(
    paths: Sequence[Path], results: Iterable[DrillResult], folder: Path, junit: Path | None, console: Console
) -> int:
    """Take the `results` of the drills in `paths` one after the other, and keep `folder`/index.html and index.json up
    to date: who stops it half-way has what was done.

    Returns:
        20 if one failed, else 21 if one is inconclusive or none passed, else 0. What can't be done here is listed and
        counts neither way.

    Raises:
        StoreError: storage refused.
        Whatever `results` raises.
    """
    done: list[DrillResult] = []
    index = _write(folder, paths, done)
    for result in results:
        done.append(result)
        index = _write(folder, paths, done)
    if junit is not None:
        write_junit(junit, done)
    counts = Counter(row.outcome for row in index.rows)
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "inconclusive", "unavailable"))
    say(console, f"{index.outcome}: {said}")
    say(console, f"see {folder / 'index.html'}")
    return _CODES[index.outcome]


class _Index(NamedTuple):
    outcome: str
    rows: list[Row]


def _write(folder: Path, paths: Sequence[Path], done: Sequence[DrillResult]) -> _Index:
    missing = {str(path) for path in paths} - {result.drill for result in done}
    planned, when = len(done) + len(missing), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    rows = [_row(result, folder) for result in done]
    index = _Index(overall([row.outcome for row in rows], planned), rows)
    page = render_index(rows, planned, when, versions_shown(), commit())
    drills = [
        row._asdict() | {"result": result.model_dump(mode="json")} for row, result in zip(rows, done, strict=True)
    ]
    plain = {"outcome": index.outcome, "planned": planned, "made": when, "drills": drills}
    with explained(f"write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("index.html", page), ("index.json", json.dumps(plain, indent=2))):
            aside = folder / f".{name}.tmp"
            aside.write_text(text)
            aside.replace(folder / name)
    return index


def _outcome(result: DrillResult) -> Outcome:
    unavailable = any(doubt.name == "unavailable" for doubt in result.judgement.doubts)
    return "unavailable" if unavailable else result.judgement.outcome


def _row(result: DrillResult, folder: Path) -> Row:
    report = Path(result.directory) / "report.html" if result.directory else None
    return Row(
        drill=result.drill,
        what=_what(Path(result.drill)),
        outcome=_outcome(result),
        reasons=[str(reason) for reason in result.judgement.reasons],
        seconds=result.seconds,
        command=result.command,
        seed=result.seed,
        report=Path(os.path.relpath(report, folder)).as_posix() if report else None,
    )


def _what(path: Path) -> str:
    """What a drill file says of itself: the comment in its first line."""
    try:
        first = path.read_text().partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        return ""
    return first.removeprefix("#").strip() if first.startswith("#") else ""
