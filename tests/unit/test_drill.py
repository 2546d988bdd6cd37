"""`harness drill` from the file to the verdict, on a driver that trains a number; and the parts that it is made of."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from chaos import faults, lasting
from chaos.directory import PlanDirectory
from chaos.drill import Drill, RandomFaults, draw, load_drill
from chaos.judgement import Judgement, Reason
from chaos.plan import FaultPlan, PlannedFault
from chaos.process import ProcessId
from chaos.shrink import shortest
from checkpointing.errors import ConfigError, Preempted
from checkpointing.events import AttemptEnded, AttemptStarted, FaultWitnessed, RunStarted, RunStopped
from checkpointing.journal import Journal, read_journal
from checkpointing.settings import Checkpoints
from harness import baselines, faulted
from harness import drill as drill_module
from harness.baselines import determined_by
from harness.cli import app
from harness.clusters import Local, find_cluster
from harness.config import RunConfig, load_config
from harness.drill import Exercise, configured, own_tiers, run_drills
from harness.engines import Engine, EnginePool
from harness.faulted import write_plan
from harness.proxies import Proxy, WatchedEngines, in_front_of_s3
from harness.results import DrillResult, worst
from harness.runs import recorded_run

from .fault_samples import behind_a_proxy, running, scene, until
from .toy import train_a_number, write_toy_run

REPOSITORY = Path(__file__).parents[2]
QUIET = Console(quiet=True)
STEPS = 4
KILL = {"fault": "kill", "target": "driver", "at": "train.begin", "step": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where drills lie and run: in one place, so that they find each other's baselines."""
    return write_toy_run(tmp_path_factory.mktemp("drills"), STEPS)


@pytest.fixture
def toy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run config, which is the current one; drivers train a number."""
    train_a_number(monkeypatch)
    monkeypatch.chdir(folder)
    return folder


def write(folder: Path, *planned: dict[str, Any], name: str = "drill", **rest: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run": "run.yaml", "faults": list(planned)} | rest))
    return path


def drilled(*paths: Path, **rest: Any) -> tuple[int, list[DrillResult]]:
    """Exit code, and what is in the verdict.json of each run that was made."""
    options: dict[str, Any] = {"as_json": False, "junit": None, "seed": None, "soak": None} | rest
    before = set(Path("runs/drills").glob("*/verdict.json"))
    code = run_drills(paths, QUIET, **options)
    made = sorted(set(Path("runs/drills").glob("*/verdict.json")) - before, key=lambda path: path.stat().st_mtime_ns)
    return code, [DrillResult.model_validate(_without_code(path)) for path in made]


def _without_code(path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(path.read_text())
    del plain["judgement"]["exit_code"]
    return plain


def test_a_run_that_is_killed_passes_and_the_next_drill_finds_its_baselines(toy: Path) -> None:
    path = write(toy, KILL, {**KILL, "at": "save.before_commit"}, expect={"steps_repeated": 1})
    code, (result,) = drilled(path)
    assert (code, result.judgement.outcome) == (0, "passed"), result.judgement.reasons
    assert (result.judgement.steps_compared, len(result.judgement.recoveries)) == (STEPS, 2)
    assert result.command == f"harness drill {path}" and result.versions["python"]
    page = (faulted_run(result).parent / "report.html").read_text()
    assert "passed" in page and result.command in page
    records = [read_journal(Path(directory)) for directory in result.baselines]
    code, (again,) = drilled(write(toy, KILL, name="other"))
    assert code == 0 and again.baselines == result.baselines
    assert [read_journal(Path(directory)) for directory in again.baselines] == records


def test_a_fault_that_never_fires_proves_nothing(toy: Path) -> None:
    code, (result,) = drilled(write(toy, {**KILL, "at": "evaluate.begin"}))
    assert code == 21
    assert {"not witnessed", "no recovery"} == {reason.name for reason in result.judgement.doubts}


def test_a_restore_that_brings_back_something_else_fails(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DEFECT", "restore")
    code, (result,) = drilled(write(toy, KILL))
    assert code == 20 and result.judgement.first_difference is not None
    assert (result.judgement.first_difference.step, result.judgement.first_difference.entry) == (2, "policy/parameters")
    assert {"diverged", "restored wrongly"} == {reason.name for reason in result.judgement.failures}


def test_a_run_that_never_comes_out_the_same_proves_nothing(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_DEFECT", "noise")
    stop = {**KILL, "fault": "stop", "seconds": 0.2}
    code, (result,) = drilled(write(toy, stop, set={"skyrl.trainer.max_training_steps": 3}))
    assert code == 21 and "baselines differ" in {reason.name for reason in result.judgement.doubts}


def test_a_driver_that_is_stopped_goes_on(toy: Path) -> None:
    code, (result,) = drilled(write(toy, {**KILL, "fault": "stop", "seconds": 0.2}))
    assert (code, result.judgement.recoveries) == (0, ()), result.judgement.reasons
    (seen,) = [r.event for r in read_journal(faulted_run(result)) if isinstance(r.event, FaultWitnessed)]
    assert seen.evidence.endswith("is stopped") and (seen.phase, seen.step) == ("train.begin", 3)


def test_a_damaged_checkpoint_is_passed_over(toy: Path) -> None:
    flip = {"fault": "flip_blob", "target": "store:file", "at": "save.committed", "step": 2, "reached_by": "driver"}
    code, (result,) = drilled(write(toy, flip, KILL))
    assert code == 0, result.judgement.reasons
    starts = [r.event for r in read_journal(faulted_run(result)) if isinstance(r.event, AttemptStarted)]
    assert [start.resumed_from for start in starts] == [None, 1]


def faulted_run(result: DrillResult) -> Path:
    assert result.directory is not None
    return Path(result.directory) / "faulted"


def test_what_the_run_has_not_is_refused_before_anything_is_started(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginePool, "__enter__", lambda _: pytest.fail("started"))
    with pytest.raises(ConfigError, match="no policy:1: this run has 1"):
        drilled(write(toy, KILL), write(toy, {**KILL, "target": "policy:1"}, name="other"))
    assert run_cli("drill", str(toy / "absent.yaml")) == 10


def test_each_run_has_a_cluster_of_its_own(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    had: list[tuple[str, Path]] = []

    class Cluster:
        def refuses(self, planned: PlannedFault) -> str | None:
            return "it never does" if planned.fault == "stop" else None

        @contextmanager
        def started(self, config: RunConfig, folder: Path) -> Iterator[RunConfig]:
            yield config.model_copy(update={"ray_address": f"cluster:{len(had)}"})
            ran = recorded_run(config.run_dir).config.ray_address
            had.append((ran, folder))

    monkeypatch.setattr(drill_module, "find_cluster", {"elsewhere": Cluster()}.__getitem__)
    path = write(toy, KILL, set={"skyrl.trainer.seed": 5}, cluster="elsewhere")
    code, (result,) = drilled(path)
    assert code == 0 and result.directory is not None
    assert [address for address, _ in had] == ["cluster:0", "cluster:1", "cluster:2"]
    assert had[2][1] == Path(result.directory) / "cluster" and len({folder for _, folder in had}) == 3
    site = FaultPlan.load(Path(result.directory) / "faults" / "plan.json").site
    assert site.cluster == had[2][1].resolve()
    code, made = drilled(write(toy, {**KILL, "fault": "stop", "seconds": 0.2}), cluster="elsewhere")
    assert (code, made, len(had)) == (21, [], 3), "refused before anything was started"


def run_cli(*arguments: str) -> int:
    command = [sys.executable, "-m", "harness.cli", *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_many_at_once_and_what_ci_reads(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = write(toy, KILL, name="passes")
    proves_nothing = write(toy, {**KILL, "at": "evaluate.begin"}, name="proves_nothing")
    absent = write(toy, {**KILL, "fault": "delete_pod"}, name="absent")
    out = Console(file=None, soft_wrap=True)
    code = run_drills([passes, proves_nothing, absent], out, True, toy / "out" / "junit.xml", None, None)
    assert code == 21
    shown = json.loads(capsys.readouterr().out)
    assert [one["judgement"]["outcome"] for one in shown] == ["inconclusive", "passed", "inconclusive"]
    assert shown[0]["judgement"]["doubts"][0]["name"] == "unavailable"
    suite = ElementTree.parse(toy / "out" / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "0", "2")
    assert [case.find("error") is None for case in suite.iter("testcase")] == [False, True, False]


def test_a_soak_draws_and_shrinks(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every resume is wrong here, so any single kill is enough to fail."""
    monkeypatch.setenv("TOY_DEFECT", "restore")
    draws = {"seed": 3, "mean_steps": 1.6, "faults": [KILL, {**KILL, "at": "step.trained"}]}
    path = write(toy, random=draws)
    code, results = drilled(path, soak=4, seed=7)
    assert code == 20
    whole, last = results[0], results[-1]
    assert len(whole.faults) > 1 and len(last.faults) == 1
    assert whole.command == last.command == f"harness drill {path} --seed 7 --soak 4"
    assert len(read_journal(faulted_run(whole))) > 5
    with pytest.raises(ConfigError, match="add a `random:` section"):
        Exercise(write(toy, KILL), QUIET, soak=5)


def test_what_determines_a_baseline(toy: Path) -> None:
    config = load_config(toy / "run.yaml", RunConfig)
    before = determined_by(config)
    other_place = config.model_copy(update={"run_dir": Path("elsewhere"), "checkpoints": Checkpoints(failed_saves=9)})
    assert determined_by(other_place) == before
    assert determined_by(config.model_copy(update={"skyrl": {"trainer.max_training_steps": 5}})) != before
    (toy / "data").mkdir()
    (toy / "data" / "train").write_text("a")
    with_data = config.model_copy(update={"skyrl": {"data.train_data": [str(toy / "data")]}})
    before = determined_by(with_data)
    (toy / "data" / "train").write_text("b")
    assert determined_by(with_data) != before


def test_a_baseline_that_was_disturbed_is_made_again(toy: Path) -> None:
    path = write(toy, KILL)
    _, (result,) = drilled(path)
    journal = next((Path(result.baselines[0]) / "journal").glob("driver-*"))
    journal.write_text(journal.read_text().rsplit("\n", 2)[0] + "\n")  # it has not finished
    old = list(map(run_id, result.baselines))
    assert drilled(path)[0] == 0
    new = list(map(run_id, result.baselines))
    assert old[0] != new[0] and old[1] == new[1]
    Journal(Path(result.baselines[1]), "supervisor", 1).append(AttemptEnded(exit_code=None, signal=9, reason="killed"))
    assert drilled(path)[0] == 0
    last = list(map(run_id, result.baselines))
    assert last[0] == new[0] and last[1] != new[1]


def run_id(directory: str) -> str:
    return next(r.event.run_id for r in read_journal(Path(directory)) if isinstance(r.event, RunStarted))


def test_of_two_drills_at_once_one_makes_the_baselines(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, locked = load_config(toy / "run.yaml", RunConfig), []

    def make(alone: RunConfig, *_: object) -> None:
        with (alone.run_dir.parent / "lock").open("w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(alone.run_dir.name)

    monkeypatch.setattr(baselines, "run_to_end", make)
    baselines.baselines(config, toy / "at-once", EnginePool(config, toy), QUIET, Local())
    assert locked == ["first", "second"]


def shown(outcome: Any) -> Judgement:
    return Judgement(outcome=outcome, doubts=(Reason(name="n", text="t"),))


def test_the_worst_outcome_decides() -> None:
    assert worst([]) == worst([shown("passed")]) == 0
    assert worst([shown("passed"), shown("inconclusive")]) == 21
    assert worst([shown("inconclusive"), shown("failed"), shown("passed")]) == 20


def test_the_drill_changes_the_run_config(toy: Path) -> None:
    changes = {
        "skyrl.trainer.epochs": 2,
        "checkpoints.tiers": ["file://", "s3://b/p"],
        "supervision.phase_seconds": 5.0,
        "engines.count": 2,
    }
    drill = Drill(run=Path("run.yaml"), set=changes, faults=(PlannedFault(**KILL),))  # type: ignore[arg-type]
    found = configured(drill, load_config(toy / "run.yaml", RunConfig), soak=9)
    assert found.skyrl == {"trainer.max_training_steps": 9, "trainer.epochs": 9}
    assert found.supervision.phase_seconds == 5.0
    assert found.engines is not None and found.engines.count == 2
    assert own_tiers(found, "now").checkpoints.tiers == ("file://", "s3://b/p/now")
    with pytest.raises(ConfigError, match="as the drill changes it"):
        configured(drill.model_copy(update={"set": {"engine.count": 2}}), load_config(toy / "run.yaml", RunConfig))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"run": "r", "faults": []}, "a drill needs `faults` or `random`"),
        ({"run": "r", "faults": [{**KILL, "fault": "nothing"}]}, "no fault 'nothing'"),
        ({"run": "r", "faults": [KILL], "expect": {"verdict": "good"}}, "expect.verdict"),
        ({"run": "r", "random": {"mean_steps": 0, "faults": [KILL]}}, "random.mean_steps"),
        ({"faults": [KILL]}, "run: Field required"),
    ],
)
def test_a_wrong_drill_is_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    (tmp_path / "drill.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=message):
        load_drill(tmp_path / "drill.yaml")
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_drill(tmp_path / "absent.yaml")


SIX_RANKS = RunConfig(
    run_dir=Path("run"),
    skyrl={"trainer": {"placement": {"policy_num_nodes": 3, "policy_num_gpus_per_node": 2}}},
)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("policy:6", "no policy:6: this run has 6 of them"),
        ("engine:0", "no engine:0: this run has 0 of them"),
        ("store:s3", "no tier store:s3: this run has store:file"),
    ],
)
def test_a_plan_aims_at_what_the_run_has(tmp_path: Path, target: str, message: str) -> None:
    config = SIX_RANKS.model_copy(update={"run_dir": tmp_path / "run"})
    name = "flip_blob" if target.startswith("store") else "kill"
    planned = PlannedFault(fault=name, target=target, at="train.begin")
    with pytest.raises(ConfigError, match=message):
        write_plan(config, (planned,), tmp_path / "faults")
    assert not (tmp_path / "faults").exists()
    path = write_plan(config, (PlannedFault(fault="kill", target="policy:5", at="train.begin"),), tmp_path / "faults")
    site = FaultPlan.load(path).site
    assert site.run_dir == tmp_path / "run" and site.stores == {"store:file": f"file://{tmp_path}/run/store"}


def drawn(seed: int, steps: int = 200, tiers: int = 1, **rest: Any) -> list[PlannedFault]:
    one = PlannedFault(fault="kill", target="driver", at="train.begin")
    damage = [
        PlannedFault(fault="flip_blob", target=f"store:{tier}", at="save.committed", reached_by="driver")
        for tier in ("file", "s3")
    ]
    told = RandomFaults(mean_steps=5, faults=(one, *damage), **rest)
    return list(draw(told, steps, tiers, seed))


def test_random_faults_come_at_exponential_intervals_and_repeat_with_their_seed() -> None:
    found = drawn(1, steps=20_000)
    steps = [planned.step or 0 for planned in found]
    assert drawn(1, steps=20_000) == found != drawn(2, steps=20_000)
    assert steps == sorted(set(steps)) and steps[0] >= 1 and steps[-1] <= 20_000
    intervals = [after - before for before, after in itertools.pairwise(steps)]
    mean = sum(intervals) / len(intervals)
    assert 4.5 < mean < 5.7
    share = sum(interval > 10 for interval in intervals) / len(intervals)
    assert 0.09 < share < 0.16, "of an exponential of mean 5, exp(-2.1) = 0.12 are longer than 10.5"


def test_the_last_copy_is_left_alone_unless_it_is_asked_for() -> None:
    def damaged(**rest: Any) -> set[str]:
        return {planned.target for planned in drawn(1, **rest) if planned.fault == "flip_blob"}

    assert damaged(tiers=1) == set()
    assert len(damaged(tiers=2)) == 1
    assert damaged(tiers=1, last_copy=True) == {"store:file", "store:s3"}


@pytest.mark.parametrize(
    ("culprits", "of"),
    [({3}, 8), ({1, 6}, 8), ({0, 3, 7}, 8), (set(range(5)), 5), ({0}, 1), ({0, 1}, 2), ({4, 11, 12, 30}, 31)],
)
def test_the_shortest_schedule_that_fails(culprits: set[int], of: int) -> None:
    asked: list[tuple[int, ...]] = []

    def fails(part: tuple[int, ...]) -> bool:
        asked.append(part)
        return culprits <= set(part)

    assert set(shortest(range(of), fails)) == culprits
    assert len(asked) == len(set(asked)), "no schedule is run twice"


def test_a_failure_that_no_part_shows_stays_whole() -> None:
    assert shortest([1, 2, 3], lambda part: len(part) == 3) == (1, 2, 3)
    assert shortest([1], lambda part: False) == (1,)


def test_a_supervisor_that_is_killed_or_stopped_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SIX_RANKS.model_copy(update={"run_dir": tmp_path / "run"})
    planned = [PlannedFault(fault="kill", target="supervisor", at="train.begin", step=n) for n in (1, 2)]
    plan = write_plan(config, tuple(planned), tmp_path / "faults")
    ended: list[Path] = []
    monkeypatch.setattr(lasting, "end_all", ended.append)

    def lives(*codes: int) -> int:
        left, seen = list(codes), []

        def run(command: list[str], **_: Any) -> SimpleNamespace:
            assert command[1:3] == ["-m", "harness.faulted"]
            seen.append(RunConfig.model_validate_json(command[3]))
            return SimpleNamespace(returncode=left.pop(0))

        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "run", run)
            faulted.meet(config, plan, EnginePool(config, tmp_path), QUIET)
        return len(seen)

    assert [lives(0), lives(-9, 75, 0), lives(-9, 20, 0), lives(-9, -9, -9, 0)] == [1, 3, 2, 3]
    assert ended == [plan.parent] * 4, "whatever lasts is healed"


def test_asked_to_stop_a_drill_heals_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does while a fault lasts."""
    config = SIX_RANKS.model_copy(update={"run_dir": tmp_path / "run"})
    stop = PlannedFault(fault="stop", target="policy:1", at="train.begin", seconds=600)
    plan = write_plan(config, (stop,), tmp_path / "faults")

    def asked(*_: object) -> None:
        assert PlanDirectory(plan.parent).find("supervisor") is not None
        scene(plan.parent, "stop", "policy:1", sleeper, seconds=600)
        sleeper.send(signal.SIGSTOP)
        assert until(sleeper.is_stopped)
        Journal(config.run_dir, "supervisor", 3).append(RunStopped(exit_code=75, reason="asked"))
        raise Preempted("stopped as asked")

    monkeypatch.setattr(faulted, "run_to_end", asked)
    with running("import time; print('ready', flush=True); time.sleep(600)") as sleeper:
        with pytest.raises(Preempted):
            faulted.meet(config, plan, EnginePool(config, tmp_path), QUIET)
        assert until(lambda: not sleeper.is_stopped())
    (seen,) = [record for record in read_journal(config.run_dir) if isinstance(record.event, FaultWitnessed)]
    assert seen.attempt == 3, "what was seen too late for the supervisor is in the journal all the same"


def test_engines_are_known_by_name_and_may_stand_behind_proxies(tmp_path: Path) -> None:
    with behind_a_proxy(tmp_path / "one") as (first, heard), Proxy(tmp_path / "proxy") as proxy:
        sleeper = subprocess.Popen(["sleep", "600"])
        try:
            engines = [
                Engine(n, sleeper, url, tmp_path / "log", tmp_path / "ledger")
                for n, url in enumerate((first, "http://h:2"))
            ]
            directory = PlanDirectory(tmp_path / "faults")
            pool = WatchedEngines(SIX_RANKS, tmp_path, engines, directory=directory, proxies={"engine:0": proxy})
            assert pool.urls == [proxy.url, "http://h:2"]
            found = directory.find("engine:1")
            assert found is not None and found.pid == sleeper.pid
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(EnginePool, "restart", lambda pool, engine: pool.engines.reverse())
                directory.announce("engine:1", ProcessId.current())
                pool.restart(engines[0])
                assert directory.find("engine:1") == found, "one that was started anew is known at once"
                pool.engines.reverse()
            with urllib.request.urlopen(f"{pool.urls[0]}/health", timeout=10) as answer:
                assert answer.status == 200
            assert heard == ["/health"]
        finally:
            sleeper.kill()
            sleeper.wait()
    assert not (tmp_path / "proxy" / "sessions").exists()


def test_s3_is_asked_through_the_proxy_for_as_long_as_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    proxy: Any = SimpleNamespace(url="http://127.0.0.1:1", point_at=seen.append)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with in_front_of_s3(proxy):
        assert (os.environ["AWS_ENDPOINT_URL"], seen) == ("http://127.0.0.1:1", ["http://127.0.0.1:9"])
    assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:9"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.amazonaws.com")
    with pytest.raises(faults.Unavailable, match="plain HTTP"), in_front_of_s3(proxy):
        pass


def test_the_catalogue_is_shown() -> None:
    shown = CliRunner().invoke(app, ["faults", "--json"])
    assert shown.exit_code == 0
    listed = {one["name"]: one["unavailable"] for one in json.loads(shown.stdout)}
    assert listed["kill"] is None and "Kubernetes" in listed["delete_pod"]


DRILLS = REPOSITORY / "configs" / "drills"


@pytest.mark.parametrize("path", sorted(DRILLS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DRILLS)))
def test_every_drill_in_configs_can_be_planned(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    try:
        drill = load_drill(path)
    except faults.Unavailable:
        pytest.skip("not on this machine")
    config = configured(drill, load_config(drill.run, RunConfig)).model_copy(update={"run_dir": tmp_path / "run"})
    planned = drill.schedule(40, len(config.checkpoints.tiers))
    assert planned and [find_cluster(drill.cluster).refuses(one) for one in planned] == [None] * len(planned)
    write_plan(config, planned, tmp_path / "faults")
