"""Six FSDP ranks on three nodes with a head of its own, beside a real object store: a drill, just as users run one."""

from pathlib import Path

import pytest
from rich.console import Console

from checkpointing.events import AttemptStarted, EngineLost, FaultWitnessed
from checkpointing.journal import read_journal
from harness import drill
from harness.config import Metrics
from harness.drill import Exercise
from harness.engines import EnginePool
from harness.exporter import TOKEN
from harness.processes import free_port
from tests.prometheus import every_query_has_data

from .conftest import REPOSITORY, assert_no_secret_of_any_process

GAUNTLET = Path("configs/drills/mission/gauntlet.yaml")


@pytest.mark.usefixtures("s3")
def test_everything_is_lost_in_turn(engines: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine, a rank during a save and one during a restore, the driver, a node; and S3 for a while."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(drill, "FOLDER", tmp_path)
    exercise = Exercise(GAUNTLET, Console(stderr=True))
    exercise.prepare(engines)
    exercise.config = exercise.config.model_copy(update={"metrics": Metrics(port=free_port())})
    with every_query_has_data(exercise.config.metrics.port, tmp_path):
        result = exercise.meet(exercise.schedule(None))
    assert result.judgement.outcome == "passed", result.judgement.reasons
    assert result.directory is not None
    events = [record.event for record in read_journal(Path(result.directory) / "faulted")]
    assert {event.index for event in events if isinstance(event, FaultWitnessed)} == set(range(6))
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    assert [start.resumed_from for start in starts] == [None, 2, 2, 3, 4]
    assert {start.world_size for start in starts} == {6}
    assert sum(isinstance(event, EngineLost) for event in events) == 1
    assert_no_secret_of_any_process(tmp_path)
