"""What `harness report` does."""

import json
import shlex
from pathlib import Path
from typing import Literal

from rich.console import Console

from chaos.judgement import Judgement
from chaos.report import Drill, Repeat, render
from chaos.verdict import compare
from checkpointing.disk import explained
from checkpointing.journal import read_journal
from checkpointing.store import KeyMissing
from checkpointing.trace import read_trace, trace_folder
from harness.commands import read_run
from harness.output import say
from harness.runs import checkpoints_of

OUTCOMES: dict[str, Literal["passed", "failed", "inconclusive"]] = {
    "identical": "passed",
    "different": "failed",
    "inconclusive": "inconclusive",
}


def report_run(run: Path, baseline: Path | None, output: Path | None, console: Console) -> None:
    """Write the report of `run`, compared with `baseline`, to `output` or `run`/report.html.

    Raises:
        ConfigError: one of them is no run directory.
        StoreError: storage refused.
    """
    subject, base = read_run(run), read_run(baseline) if baseline else []
    verdict = compare(base, subject)
    words = ["harness", "report", str(run), *(["--baseline", str(baseline)] if baseline else [])]
    drill = Drill(
        title=run.resolve().name,
        outcome=OUTCOMES[verdict.outcome],
        reasons=verdict.reasons if baseline else ("no baseline was named: nothing was compared",),
        baseline=base,
        subject=subject,
        repeat=_repeat(run, shlex.join(words)),
        trace=read_trace(trace_folder(run)),
    )
    target = output or run / "report.html"
    with explained(f"write {target}"):
        target.write_text(render(drill))
    say(console, f"{verdict.outcome if baseline else 'nothing compared'}: {target}")


def report_drill(directory: Path, run: Path, baseline: Path, judgement: Judgement, repeat: Repeat) -> None:
    """Write `directory`/report.html about a judged drill: the run that met the faults beside one that did not."""
    drill = Drill(
        title=directory.name,
        outcome=judgement.outcome,
        reasons=[str(reason) for reason in judgement.reasons],
        baseline=read_journal(baseline),
        subject=read_journal(run),
        repeat=repeat,
        trace=read_trace(trace_folder(run)),
    )
    (directory / "report.html").write_text(render(drill))


def _repeat(run: Path, command: str) -> Repeat:
    try:
        record = json.loads(checkpoints_of(run).open(run).get("run.json"))
    except KeyMissing:
        return Repeat(command=command)
    return Repeat(command=command, seed=record["seed"], versions=record["versions"])
