"""One move a turn: each turn is a request with a seed of its own, and a kill between turns changes nothing."""

from chaos.verdict import compare
from checkpointing.events import StepDone

from .conftest import Train


def test_killed_between_the_turns_of_its_trajectories(train: Train) -> None:
    keys = {"generator.max_turns": 6, "trainer.max_training_steps": 2}
    whole = train("multi-turn", **keys)
    steps = [record.event for record in whole if isinstance(record.event, StepDone)]
    assert not all(step.zero_advantages for step in steps)
    kill = {"fault": "kill", "target": "driver", "at": "generate.request", "step": 2, "nth": 18}
    killed = train("multi-turn-killed", (kill,), **keys)
    verdict = compare(whole, killed)
    assert verdict.outcome == "identical", verdict.reasons
