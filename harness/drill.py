"""`harness drill`: the run left alone twice, the run with faults, and the verdict; and a soak of random faults."""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from chaos import faults
from chaos.drill import Drill, load_drill
from chaos.judgement import Judgement, judge
from chaos.plan import FaultPlan, PlannedFault
from chaos.report import Repeat
from chaos.shrink import shortest
from checkpointing.errors import ConfigError, Preempted
from checkpointing.events import RunStarted
from checkpointing.journal import read_journal
from harness.baselines import baselines
from harness.clusters import find_cluster
from harness.commands import prepare
from harness.config import RunConfig, flatten, load_config
from harness.engines import EnginePool
from harness.faulted import meet, require_targets, small_disk, write_plan
from harness.junit import write_junit
from harness.output import say
from harness.proxies import behind_proxies, s3_endpoint
from harness.reports import report_drill
from harness.results import DrillResult, nothing_proved, shown, versions_shown, worst
from trainer.provenance import commit

FOLDER = Path("runs/drills")


class Exercise:
    """One drill file, its run config and its engines: runs any schedule of faults against the same baselines."""

    def __init__(self, path: Path, console: Console, soak: int | None = None, cluster: str | None = None) -> None:
        self.path, self.drill, self._console = path, load_drill(path), console
        self._soak, self._elsewhere = soak, cluster
        self._cluster = find_cluster(cluster or self.drill.cluster)
        self.config = configured(self.drill, load_config(self.drill.run, RunConfig), soak)
        planned = (*self.drill.faults, *(self.drill.random.faults if self.drill.random else ()))
        require_targets(self.config, planned)
        for one in planned:
            if refused := self._cluster.refuses(one):
                raise faults.Unavailable(f"{path}: the fault {one.fault!r} can't be done on this cluster: {refused}")
        if any(target.startswith("store:") for target in behind_proxies(planned)):
            s3_endpoint()
        if soak is not None and self.drill.random is None:
            raise ConfigError(f"{path}: a soak draws its faults; add a `random:` section")

    def prepare(self, engines: EnginePool) -> None:
        """Have the baselines. Raises like `supervise`."""
        self._engines = engines
        prepare(self.config, self._console)
        self.baselines = baselines(self.config, FOLDER / "baselines", engines, self._console, self._cluster)

    def seed(self, given: int | None) -> int | None:
        """Of the random faults: what was given, or the drill's own; None where it has none."""
        if self.drill.random is None:
            return None
        return self.drill.random.seed if given is None else given

    def schedule(self, seed: int | None) -> tuple[PlannedFault, ...]:
        start = next(record.event for record in read_journal(self.baselines[0]) if isinstance(record.event, RunStarted))
        return self.drill.schedule(start.planned_steps, len(self.config.checkpoints.tiers), seed)

    def meet(self, planned: tuple[PlannedFault, ...], seed: int | None = None) -> DrillResult:
        """The run with these faults, judged. Raises like `harness.faulted.meet`."""
        began, directory = time.time(), self._new_directory()
        config = own_tiers(self.config.model_copy(update={"run_dir": directory / "faulted"}), directory.name)
        cluster = directory / "cluster"
        with small_disk(config.run_dir, self.drill.disk_bytes), self._cluster.started(config, cluster) as joined:
            plan = write_plan(joined, planned, directory / "faults", cluster)
            meet(joined, plan, self._engines, self._console)
        result = DrillResult(
            drill=str(self.path),
            command=self._command(seed),
            directory=str(directory),
            seed=seed,
            faults=planned,
            judgement=self._judge(config.run_dir, plan),
            seconds=time.time() - began,
            versions=versions_shown(),
            commit=commit(),
            baselines=tuple(map(str, self.baselines)),
        )
        (directory / "verdict.json").write_text(result.model_dump_json(indent=2))
        repeat = Repeat(command=result.command, seed=seed, versions=result.versions)
        report_drill(directory, config.run_dir, self.baselines[0], result.judgement, repeat)
        return result

    def _judge(self, faulted: Path, plan: Path) -> Judgement:
        first, second, met = map(read_journal, (*self.baselines, faulted))
        return judge(first, second, met, FaultPlan.load(plan), self.drill.expect)

    def _new_directory(self) -> Path:
        stamp = f"{self.path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        names = (stamp if n == 1 else f"{stamp}-{n}" for n in range(1, 1000))
        directory = next(FOLDER / name for name in names if not (FOLDER / name).exists())
        directory.mkdir(parents=True)
        return directory

    def _command(self, seed: int | None) -> str:
        told = {"--seed": seed, "--soak": self._soak, "--cluster": self._elsewhere}
        options = [f"{option} {value}" for option, value in told.items() if value is not None]
        return " ".join(["harness drill", str(self.path), *options])


def run_drills(
    paths: Sequence[Path],
    console: Console,
    as_json: bool,
    junit: Path | None,
    seed: int | None,
    soak: int | None,
    cluster: str | None = None,
) -> int:
    """Every drill, one after the other. Returns 20 if one failed, else 21 if one is inconclusive, else 0.

    Raises like `drilled`.
    """
    quiet = Console(file=sys.stderr) if as_json else console
    results = list(drilled(paths, quiet, seed, soak, cluster))
    if as_json:
        console.print_json(data=[result.model_dump(mode="json") for result in results])
    if junit is not None:
        write_junit(junit, results)
    return worst([result.judgement for result in results])


def drilled(
    paths: Sequence[Path],
    console: Console,
    seed: int | None = None,
    soak: int | None = None,
    cluster: str | None = None,
    keep_going: bool = False,
) -> Iterator[DrillResult]:
    """What became of each drill, those first that can't be done here; `cluster` instead of the one that a file names.

    With `keep_going` what keeps a drill from being run is its result, and the next one follows.

    Raises:
        Preempted: asked to stop.
        ConfigError: a drill or its run config is wrong; all are read before the first is run.
        HarnessError: a run could not even begin.
    """
    exercises = []
    for path in paths:
        try:
            exercises.append(Exercise(path, console, soak, cluster))
        except ConfigError as error:
            here = isinstance(error, faults.Unavailable)
            if not (here or keep_going):
                raise
            yield shown(nothing_proved(path, "unavailable" if here else "not run", error), console)
    for _, alike in itertools.groupby(exercises, key=lambda exercise: engine_settings(exercise.config)):
        together = list(alike)
        with EnginePool(together[0].config, FOLDER / "logs") as engines:
            for exercise in together:
                try:
                    yield from _met(exercise, engines, console, seed, soak is not None)
                except Preempted:
                    raise
                except Exception as error:
                    if not keep_going:
                        raise
                    console.print_exception()
                    yield shown(nothing_proved(exercise.path, "not run", error), console)


def _met(
    exercise: Exercise, engines: EnginePool, console: Console, seed: int | None, soak: bool
) -> Iterator[DrillResult]:
    exercise.prepare(engines)
    drawn = exercise.seed(seed)
    result = exercise.meet(exercise.schedule(drawn), drawn)
    yield shown(result, console)
    if soak and result.judgement.outcome == "failed":
        yield _shrunk(exercise, result, console)


def engine_settings(config: RunConfig) -> str:
    """What engines are started with: starting them takes about a minute, so drills share them where they can."""
    names = ("trainer.policy.model.", "generator.inference_engine.")
    skyrl = {key: value for key, value in flatten(config.skyrl).items() if key.startswith(names)}
    return repr((config.device, config.engines, sorted(skyrl.items())))


def _shrunk(exercise: Exercise, failed: DrillResult, console: Console) -> DrillResult:
    """The shortest part of the schedule that still fails, run (again)."""
    say(console, f"seed {failed.seed} fails; looking for the shortest schedule that does")
    last = failed

    def fails(planned: tuple[PlannedFault, ...]) -> bool:
        nonlocal last
        result = exercise.meet(planned, failed.seed)
        shown(result, console)
        if result.judgement.outcome == "failed":
            last = result
        return result.judgement.outcome == "failed"

    planned = shortest(failed.faults, fails)
    say(console, f"shortest: {len(planned)} of {len(failed.faults)} faults, see {last.directory}")
    for one in planned:
        say(console, f"  {one}")
    return last


def configured(drill: Drill, config: RunConfig, soak: int | None = None) -> RunConfig:
    """The run config with what the drill changes in it. Raises ConfigError: a key that no run config has."""
    changes = dict(drill.set)
    if soak is not None:
        changes |= {"skyrl.trainer.max_training_steps": soak, "skyrl.trainer.epochs": soak}
    plain = config.model_dump(mode="json")
    plain["skyrl"] = flatten(plain["skyrl"])
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        if section == "skyrl":
            plain["skyrl"][rest] = value
        else:
            _set(plain, key.split("."), value)
    try:
        return RunConfig.model_validate(plain)
    except ValueError as error:
        raise ConfigError(f"{drill.run}, as the drill changes it: {error}") from error


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree[part] = tree.get(part) or {}
        tree = tree[part]
    tree[path[-1]] = value


def own_tiers(config: RunConfig, name: str) -> RunConfig:
    """With a place of its own on every tier: a run that finds another's checkpoints would go on from there."""
    relative = ("file://", "memory://")
    tiers = tuple(url if url in relative else f"{url.rstrip('/')}/{name}" for url in config.checkpoints.tiers)
    return config.model_copy(update={"checkpoints": config.checkpoints.model_copy(update={"tiers": tiers})})
