"""`harness`: the commands a person types. Exit codes are listed in checkpointing/errors.py and the README."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from checkpointing.errors import HarnessError
from checkpointing.redaction import redacted

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=False, soft_wrap=True)

ConfigFile = Annotated[Path, typer.Argument(help="run config, see configs/")]
RunDirectory = Annotated[Path, typer.Argument(help="run directory")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="run directory, or the URL of a store")]
WritableRun = Annotated[str, typer.Argument(metavar="RUN", help="run directory")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
TierName = Annotated[str | None, typer.Option("--tier", help="only this tier: file, s3, ...")]
ReadData = Annotated[bool, typer.Option("--read-data", help="read every byte, not only sizes")]


@app.command()
def run(config: ConfigFile) -> None:
    """Train to the end, resuming by itself from the newest commit as often as it takes."""
    from harness.commands import run_config

    run_config(config, console)


@app.command()
def submit(
    config: ConfigFile,
    address: Annotated[str, typer.Option(help="dashboard of a Ray cluster: http://HOST:8265, sagemaker_ray://CLUSTER")],
) -> None:
    """Have a Ray cluster do `harness run CONFIG` as a job, and return at once. RAY_AUTH_TOKEN is its token."""
    from harness.submit import submit_run

    submit_run(config, address, console)


@app.command()
def resume(run: RunDirectory) -> None:
    """Go on with a run as it was started: `harness run` with the config that is recorded in its directory."""
    from harness.living import resume_run

    resume_run(run, console)


@app.command()
def stop(run: WritableRun) -> None:
    """Have a run save what it can and end, wherever it runs. It ends with exit code 75: `harness resume` goes on."""
    from harness.living import stop_run

    stop_run(run, console)


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """How a run is: phase, step, rate, reward, checkpoints, failures, expected end. Live on a terminal.

    A store knows its newest checkpoint and how many attempts there were.
    """
    from harness.living import show_status

    show_status(run, console, as_json)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where run directories are")], as_json: AsJson = False
) -> None:
    """One line for each run in DIR."""
    from harness.living import show_runs

    show_runs(folder, console, as_json)


@app.command()
def events(
    run: RunDirectory,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the run ends")] = False,
    as_json: AsJson = False,
) -> None:
    """What happened in a run, in order. JSON: one object a line."""
    from harness.living import show_events

    show_events(run, console, follow, as_json)


@app.command()
def logs(
    run: RunDirectory,
    attempt: Annotated[int | None, typer.Option(min=1, help="of this attempt; of the newest without it")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the run ends")] = False,
    as_json: AsJson = False,
) -> None:
    """What every process of an attempt said, in one stream. JSON: one object a line."""
    from harness.living import show_logs

    show_logs(run, attempt, console, follow, as_json)


@app.command()
def metrics(
    run: RunDirectory,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 9464,
    address: Annotated[str, typer.Option(help="what to listen on")] = "127.0.0.1",
) -> None:
    """Serve what there is to know of a run to Prometheus, without its supervisor: afterwards, or from elsewhere."""
    from harness.config import Metrics
    from harness.exporter import serve

    serve(run, Metrics(port=port, address=address))


@app.command()
def verify(baseline: RunDirectory, subject: RunDirectory, as_json: AsJson = False) -> None:
    """Are two runs the same, bit for bit? Exit code 0 identical, 20 different, 21 can't tell."""
    from harness.commands import verify_runs

    raise typer.Exit(verify_runs(baseline, subject, console, as_json))


@app.command()
def report(
    run: RunDirectory,
    baseline: Annotated[Path | None, typer.Option(metavar="RUN", help="the run to compare it with")] = None,
    output: Annotated[Path | None, typer.Option(help="HTML file; RUN/report.html without it")] = None,
) -> None:
    """Write one HTML file about a run that met faults: verdict, timeline, recoveries, digests."""
    from harness.reports import report_run

    report_run(run, baseline, output, console)


@app.command()
def checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints of a run: where they are, how large, how old, and who needs them."""
    from harness.checkpoints import show_checkpoints

    show_checkpoints(run, console, as_json)


@app.command()
def check(run: Run, tier: TierName = None, read_data: ReadData = False, as_json: AsJson = False) -> None:
    """Verify all checkpoints of a run. Exit code 0 whole, 22 damaged but the newest restores, 12 it does not."""
    from harness.checkpoints import check_run

    raise typer.Exit(check_run(run, tier, read_data, console, as_json))


@app.command()
def repair(run: WritableRun, tier: TierName = None, read_data: ReadData = False) -> None:
    """Put back what a tier has lost and another tier still has. Deletes nothing. Exit codes as `check`."""
    from harness.checkpoints import repair_run

    raise typer.Exit(repair_run(run, tier, read_data, console))


@app.command()
def diff(
    run: Run,
    step_a: int,
    step_b: int,
    other: Annotated[str | None, typer.Option("--with", help="the run that STEP_B is of")] = None,
    as_json: AsJson = False,
) -> None:
    """Which entries and tensors differ between two checkpoints, and by how much."""
    from harness.checkpoints import diff_steps

    diff_steps(run, (step_a, step_b), other, console, as_json)


@app.command()
def prune(
    run: WritableRun,
    tier: Annotated[str, typer.Option("--tier", help="where to delete: file, s3, ...")],
    newest: Annotated[int | None, typer.Option(min=1, help="keep so many of the newest")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="keep steps that are a multiple of this")] = None,
    best: Annotated[str | None, typer.Option(help="keep the best by this metric of the journal")] = None,
    best_count: Annotated[int, typer.Option(min=1, help="how many of the best")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be freed")] = False,
) -> None:
    """Delete old checkpoints of one tier. Without policies: by the run's own for that tier."""
    from harness.checkpoints import policy, prune_run

    prune_run(run, tier, policy(newest, every, best, best_count), dry_run, console)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, typer.Argument(help="folder to make")],
    step: Annotated[int | None, typer.Option(help="which checkpoint; the newest without it")] = None,
    form: Annotated[Literal["huggingface", "orbax"], typer.Option("--to", help="as what")] = "huggingface",
    promote: Annotated[str | None, typer.Option(help="a name under which no retention deletes this checkpoint")] = None,
) -> None:
    """Write a checkpoint in a form that others read."""
    from harness.interchange import export_run

    export_run(run, out, step, form, promote, console)


@app.command(name="import")
def import_(config: ConfigFile, stock: Annotated[Path, typer.Argument(help="stock SkyRL's .../global_step_N")]) -> None:
    """Begin the run of CONFIG with a checkpoint that stock SkyRL saved. Nothing in it is executed."""
    from harness.interchange import import_stock_run

    import_stock_run(config, stock, console)


@app.command()
def demo(config: ConfigFile) -> None:
    """Train twice from the same seed, kill the second run three times, and compare the two bit for bit."""
    from harness.demo import run_demo

    raise typer.Exit(run_demo(config, console))


@app.command()
def train(config: ConfigFile) -> None:
    """Train on mazes and compare the base and the trained model on held-out ones."""
    from harness.commands import train_and_compare

    raise typer.Exit(train_and_compare(config, console))


@app.command()
def drill(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="drills, or folders of them: configs/drills/")],
    as_json: AsJson = False,
    junit: Annotated[Path | None, typer.Option(help="also write the results as JUnit XML")] = None,
    seed: Annotated[int | None, typer.Option(help="of random faults, instead of the file's")] = None,
    soak: Annotated[int | None, typer.Option(min=2, help="random faults for so many steps")] = None,
    cluster: Annotated[str | None, typer.Option(help="instead of the file's: a profile, or an address")] = None,
    index: Annotated[
        Path | None, typer.Option(metavar="DIR", help="run all whatever fails; DIR/index.html and index.json show them")
    ] = None,
) -> None:
    """Does the run survive these faults? Exit code 0 every drill passed, 20 one failed, 21 one proved nothing."""
    from harness.drill import drilled, run_drills
    from harness.drill_index import drill_all, drill_files

    paths = drill_files(files)
    if index is None:
        raise typer.Exit(run_drills(paths, console, as_json, junit, seed, soak, cluster))
    if as_json:
        raise typer.BadParameter("with --index, index.json is the JSON")
    results = drilled(paths, console, seed, soak, cluster, keep_going=True)
    raise typer.Exit(drill_all(paths, results, index, junit, console))


@app.command()
def faults(as_json: AsJson = False) -> None:
    """What a drill can break, and what of that can't be broken on this machine, and why."""
    from harness.catalogue import show_faults

    show_faults(console, as_json)


@app.command()
def doctor(config: ConfigFile) -> None:
    """Measure what can be promised on this machine about the engine, and whether two short runs agree."""
    from harness.doctor import examine

    raise typer.Exit(examine(config, console))


def main() -> None:
    """Entry point: every HarnessError becomes one line and its exit code."""
    try:
        app()
    except HarnessError as error:
        print(redacted(f"error: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
