"""`python -m tests.simulation --seed N --schedules M`: simulate that many runs, and replay one that failed."""

import gc
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from .faults import Schedule, draw
from .mutations import MUTATIONS, Mutation
from .run import Simulation

app = typer.Typer(add_completion=False)


class Outcome(NamedTuple):
    """`failure`: None if every invariant held. `faults`: how many of the schedule's really happened."""

    seed: int
    points: int
    faults: int
    failure: str | None


def simulate(schedule: Schedule, mutation: Mutation | None = None) -> tuple[Simulation, str | None]:
    """One run; and what was wrong with it, if something was."""
    run = Simulation(schedule)
    try:
        run.run(mutation)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return run, f"{type(error).__name__}: {error}"
    return run, None


def shrink(schedule: Schedule, mutation: Mutation | None = None) -> Schedule:
    """Leave out, one by one, the faults without which it still fails."""
    for fault in schedule.faults:
        fewer = schedule._replace(faults=tuple(one for one in schedule.faults if one is not fault))
        if simulate(fewer, mutation)[1] is not None:
            schedule = fewer
    without = schedule._replace(poison=None)
    return without if schedule.poison and simulate(without, mutation)[1] is not None else schedule


def _one(seed: int) -> Outcome:
    if seed % 50 == 0:
        gc.collect()
    run, failure = simulate(draw(seed))
    happened = sum(what.startswith(("FAULT", "POISON")) for _, _, what in run.world.trace)
    return Outcome(seed, len(run.world.trace), happened, failure)


def _quiet() -> None:
    """Product code warns of what it survives, which is all that ever happens here."""
    logging.disable()
    # Libraries leave a large heap that never changes: collecting it again and again takes longer than the runs.
    gc.freeze()
    gc.disable()
    # One of its threads runs at a time: to wake the next one up on another core would take it longer.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[multiprocessing.current_process()._identity[0] % len(cores)]})
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def outcomes(seeds: Iterator[int], processes: int, end: float) -> Iterator[Outcome]:
    """In no particular order, and no more of them once it is `end` on the monotonic clock."""
    with multiprocessing.get_context("fork").Pool(processes, initializer=_quiet) as pool:
        while time.monotonic() < end and (batch := list(islice(seeds, processes * 1000))):
            yield from pool.imap_unordered(_one, batch, chunksize=2)  # or one waits long for the other


@app.command()
def main(
    seed: Annotated[int, typer.Option(help="of the first schedule; each next one has the next")] = 0,
    schedules: Annotated[int, typer.Option(help="how many; one is replayed with a trace")] = 10_000,
    minutes: Annotated[float | None, typer.Option(help="go on for so long instead")] = None,
    processes: Annotated[int, typer.Option(help="that simulate side by side")] = 2,
    plant: Annotated[
        str | None, typer.Option(help=f"a defect to plant when one is replayed: {', '.join(MUTATIONS)}")
    ] = None,
) -> None:
    """Exit code 0: every invariant held in every schedule; 1: not, and how to replay the first that failed."""
    if schedules == 1 and minutes is None:
        raise typer.Exit(replay(seed, plant))
    began = time.monotonic()
    seeds = iter(range(seed, seed + schedules)) if minutes is None else count(seed)
    end = math.inf if minutes is None else began + 60 * minutes
    done = points = faults = 0
    failed: list[Outcome] = []
    for one in outcomes(seeds, processes, end):
        done, points, faults = done + 1, points + one.points, faults + one.faults
        failed += [one] if one.failure else []
    seconds = time.monotonic() - began
    print(
        f"{done} schedules, {faults} faults, {points} events in {seconds:.0f} s: "
        f"{60 * done / seconds:.0f} schedules a minute on {processes} processes"
    )
    for one in sorted(failed)[:10]:
        print(f"FAILED seed {one.seed}: {one.failure}\n  replay: {_replay_line(one.seed)}")
    print(f"{len(failed)} failed, at commit {_commit()}")
    raise typer.Exit(1 if failed else 0)


def replay(seed: int, plant: str | None) -> int:
    """Print every event of one schedule, what was wrong, and the shortest schedule that still fails."""
    logging.disable()
    mutation = MUTATIONS[plant] if plant else None
    schedule = draw(seed)
    run, failure = simulate(schedule, mutation)
    for moment, who, what in run.world.trace:
        print(f"{moment:12.4f}  {who:18}  {what}")
    print(f"\n{_described(schedule)}")
    if failure is None:
        print("every invariant held")
        return 0
    print(f"FAILED: {failure}\nenough for it: {_described(shrink(schedule, mutation))}")
    print(f"at commit {_commit()}; replay: {_replay_line(seed)}{f' --plant {plant}' if plant else ''}")
    return 1


def _described(schedule: Schedule) -> str:
    fields = schedule._asdict() | {"faults": [str(fault) for fault in schedule.faults]}
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _replay_line(seed: int) -> str:
    return f"python -m tests.simulation --seed {seed} --schedules 1"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    app()
