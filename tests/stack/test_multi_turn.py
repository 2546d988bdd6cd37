"""One move a turn: each turn is a request with a seed of its own, and a kill between turns changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.plan import FaultPlan
from chaos.verdict import compare
from checkpointing.events import StepDone
from checkpointing.journal import read_journal
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.supervisor import supervise
from trainer.maze.spec import MazeSpec
from trainer.maze.task import build_task

from .conftest import REPOSITORY

TURNS = 6
KILL = {"fault": "kill", "target": "driver", "at": "generate.request", "step": 2, "nth": 18}


@pytest.fixture
def talker(configure: Callable[..., RunConfig]) -> Callable[[str], RunConfig]:
    """Configs of runs whose base model was warmed up on conversations: the shared one answers with whole paths."""
    paths = build_task(REPOSITORY / "build" / "maze-turns", MazeSpec(max_turns=TURNS, held_out=200, warm_up_steps=40))
    keys: dict[str, Any] = {
        "generator.max_turns": TURNS,
        "trainer.max_training_steps": 2,
        "trainer.policy.model.path": str(paths.model),
    }
    return lambda name: configure(name, **keys)


def test_killed_between_the_turns_of_its_trajectories(talker: Callable[[str], RunConfig], tmp_path: Path) -> None:
    whole, killed = talker("multi-turn"), talker("multi-turn-killed")
    plan = tmp_path / "plan.json"
    plan.write_text(FaultPlan.model_validate({"faults": [KILL]}).model_dump_json())
    with EnginePool(whole, tmp_path / "engines") as engines:
        supervise(whole, engines)
        supervise(killed, engines, plan)
    steps = [record.event for record in read_journal(whole.run_dir) if isinstance(record.event, StepDone)]
    assert not all(step.zero_advantages for step in steps)
    verdict = compare(read_journal(whole.run_dir), read_journal(killed.run_dir))
    assert verdict.outcome == "identical", verdict.reasons
