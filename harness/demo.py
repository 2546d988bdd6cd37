"""`harness demo`: one run left alone, one run killed, and the proof that they are the same run."""

import time
from pathlib import Path

from pydantic import Field
from rich.console import Console

from chaos.plan import FaultPlan, PlannedFault
from chaos.recovery import recoveries
from chaos.verdict import compare
from checkpointing.journal import Record
from harness.commands import digest_share, prepare, read_run, run_to_end
from harness.config import RunConfig, load_config
from harness.engines import EnginePool
from harness.picture import draw_rewards


class DemoConfig(RunConfig):
    """A run config and the faults to inject into its second run."""

    faults: tuple[PlannedFault, ...] = Field(min_length=1)


def run_demo(path: Path, console: Console) -> int:
    """Returns the verdict's exit code: 0 only if the killed run is bit-identical to the other."""
    config = load_config(path, DemoConfig)
    prepare(config, console)
    directory = config.run_dir / time.strftime("%Y%m%d-%H%M%S")
    run = RunConfig.model_validate(config.model_dump(exclude={"faults"}))
    baseline = run.model_copy(update={"run_dir": directory / "baseline"})
    killed = run.model_copy(update={"run_dir": directory / "killed"})
    plan = directory / "faults" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text(FaultPlan(faults=config.faults).model_dump_json())
    with EnginePool(config, directory / "logs") as engines:
        run_to_end(baseline, console, "left alone", engines)
        run_to_end(killed, console, "killed    ", engines, plan)
    left_alone, survived = read_run(baseline.run_dir), read_run(killed.run_dir)
    verdict = compare(left_alone, survived)
    _report_recoveries(survived, console)
    console.print(f"digests took {digest_share(survived):.1%} of step time")
    draw_rewards({"left alone": left_alone, "killed and resumed": survived}, directory / "rewards.png")
    console.print(f"reward curves: {directory / 'rewards.png'}")
    shown = "bit-identical" if verdict.outcome == "identical" else verdict.outcome
    console.print(f"verdict: {shown} ({verdict.steps_compared} steps, {verdict.entries_compared} values compared)")
    for reason in verdict.reasons:
        console.print(f"  {reason}")
    console.print(f"again: harness verify {baseline.run_dir} {killed.run_dir}")
    return verdict.exit_code


def _report_recoveries(records: list[Record], console: Console) -> None:
    for recovery in recoveries(records):
        what = (
            ", ".join(f"{f.fault} {f.target} at {f.phase}, step {f.step}" for f in recovery.faults)
            or "no fault of ours"
        )
        down = f"{recovery.seconds_down:.0f} s" if recovery.seconds_down is not None else "never"
        console.print(
            f"attempt {recovery.attempt} died ({what}); next step done after {down}, resumed from step "
            f"{recovery.resumed_from}, {recovery.steps_repeated} steps repeated"
        )
