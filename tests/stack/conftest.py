"""One maze task, one engine and one uninterrupted run, shared by every test that needs the real stack.

Starting an engine takes about a minute and a driver most of one, so tests share what isolation allows: runs have their
own directories, clusters and journals; the engine is loaded with the adapter of whichever run is training.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from chaos.plan import FaultPlan
from checkpointing.errors import AttemptsExhausted
from checkpointing.journal import Record, read_journal
from checkpointing.redaction import LEFT_OUT
from harness.config import RunConfig, load_config
from harness.engines import EnginePool
from harness.supervisor import supervise
from harness.weed import SECRET_KEY, Weed
from tests.heads import Head
from tests.secrets import assert_no_secret
from trainer.maze.task import build_task

REPOSITORY = Path(__file__).parents[2]
PROMPTS_PER_STEP = 4
STEPS_PER_EPOCH = 5
RANKS = 6
"""For which the shared cluster has room: two each of policy, critic and reference."""

PASSWORD = 'correct horse/"bättery"+st%ple'
SAYS = "the password is"
"""How processes say what secret the environment holds."""

Train = Callable[..., list[Record]]
"""train(name, faults=(), **dotted SkyRL keys) -> journal of the finished run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/stack" in str(item.path):
            item.add_marker(pytest.mark.stack)


@pytest.fixture(scope="session", autouse=True)
def _talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that run code of users' say a secret as they start: Python begins by importing `sitecustomize`."""
    folder = tmp_path_factory.mktemp("talkative")
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        'theirs = "harness.driver", "vllm_server_actor", "ray/_private/workers"\n'
        'if any(name in " ".join(sys.orig_argv) for name in theirs):\n'
        f'    print("{SAYS}", os.environ.get("TEAM_DB_PASSWORD"), file=sys.stderr)\n'
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TEAM_DB_PASSWORD", PASSWORD)
        environment.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


def assert_no_secret_of_any_process(folder: Path) -> None:
    """Neither what they said of the password, which they did, nor what they sign requests to the object store with."""
    assert any(f"{SAYS} {LEFT_OUT}" in path.read_text() for path in folder.rglob("attempt-*.jsonl"))
    assert_no_secret(folder, PASSWORD)
    assert_no_secret(folder, SECRET_KEY)


@pytest.fixture(scope="session")
def ray_head(_talkative: None, weed: Weed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray cluster for every run that needs none of its own: to start one takes each driver 10 s.

    Its nodes have credentials for the object store, as a real cluster's do: ranks read from it.
    """
    head = Head(tmp_path_factory.mktemp("cluster"), {}, cpus=RANKS + 1, gpus=RANKS)
    try:
        with weed.in_environment():
            head.start()
        yield head.address
    finally:
        head.kill()


@pytest.fixture(scope="session")
def task(ray_head: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo's run config, cut down to 15 short steps over 3 epochs of 5 batches, two optimizer steps each."""
    config = load_config(REPOSITORY / "configs" / "test.yaml", RunConfig)
    assert config.maze is not None
    paths = build_task(REPOSITORY / "build" / "maze", config.maze)
    few = tmp_path_factory.mktemp("data") / "train.parquet"
    parquet.write_table(parquet.read_table(paths.train).slice(0, PROMPTS_PER_STEP * STEPS_PER_EPOCH), few)
    plain: dict[str, Any] = config.model_dump() | {"ray_address": ray_head}
    plain["skyrl"]["data"]["train_data"] = [str(few)]
    return plain


@pytest.fixture(scope="session")
def engines(task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    with EnginePool(RunConfig.model_validate(task), tmp_path_factory.mktemp("engines")) as pool:
        yield pool


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def configure(task: dict[str, Any], runs: Path) -> Callable[..., RunConfig]:
    """configure(name, **dotted SkyRL keys) -> config of a run with its own directory."""

    def make(name: str, **skyrl: Any) -> RunConfig:
        config = RunConfig.model_validate(task | {"run_dir": runs / name})
        return config.model_copy(update={"skyrl": merge(config.skyrl, skyrl)})

    return make


def merge(tree: dict[str, Any], dotted: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tree` with dotted keys set."""
    merged = dict(tree)
    for path, value in dotted.items():
        first, _, rest = path.partition(".")
        merged[first] = merge(merged.get(first, {}), {rest: value}) if rest else value
    return merged


@pytest.fixture(scope="session")
def train(configure: Callable[..., RunConfig], engines: EnginePool) -> Train:
    def to_end(name: str, faults: tuple[dict[str, Any], ...] = (), **skyrl: Any) -> list[Record]:
        config = configure(name, **skyrl)
        plan = config.run_dir / "faults" / "plan.json" if faults else None
        if plan is not None:
            plan.parent.mkdir(parents=True)
            plan.write_text(FaultPlan.model_validate({"faults": faults}).model_dump_json())
        supervise(config, engines, plan)
        return read_journal(config.run_dir)

    return to_end


@pytest.fixture(scope="session")
def baseline(train: Train) -> list[Record]:
    """The uninterrupted run that others are compared with."""
    return train("baseline")


def run_until_killed(
    config: RunConfig, engines: EnginePool, plan: Path, watch: Callable[[], None] = lambda: None
) -> None:
    """One attempt, which the plan is to kill."""
    none = config.supervision.model_copy(update={"restarts_per_hour": 0})
    with pytest.raises(AttemptsExhausted, match="SIGKILL"):
        supervise(config.model_copy(update={"supervision": none}), engines, plan, watch)
