"""`harness`: the commands a person types. Exit codes are listed in checkpointing/errors.py and the README."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from checkpointing.errors import HarnessError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=False, soft_wrap=True)

ConfigFile = Annotated[Path, typer.Argument(help="run config, see configs/")]
RunDirectory = Annotated[Path, typer.Argument(help="run directory")]


@app.command()
def run(config: ConfigFile) -> None:
    """Train to the end, resuming by itself from the newest commit as often as it takes."""
    from harness.commands import run_config

    run_config(config, console)


@app.command()
def verify(
    baseline: RunDirectory, subject: RunDirectory, as_json: Annotated[bool, typer.Option("--json")] = False
) -> None:
    """Are two runs the same, bit for bit? Exit code 0 identical, 20 different, 21 can't tell."""
    from harness.commands import verify_runs

    raise typer.Exit(verify_runs(baseline, subject, console, as_json))


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
def doctor(config: ConfigFile) -> None:
    """Measure what can be promised on this machine about the engine, and whether two short runs agree."""
    from harness.doctor import examine

    raise typer.Exit(examine(config, console))


def main() -> None:
    """Entry point: every HarnessError becomes one line and its exit code."""
    try:
        app()
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
