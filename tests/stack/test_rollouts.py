"""A step killed in mid-generation: what was finished, and with continuation what was begun, is not generated again."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.plan import FaultPlan
from chaos.verdict import compare
from checkpointing.events import StepDone
from checkpointing.generations import Generation, decode_line
from checkpointing.journal import Record, read_journal
from harness.config import RunConfig
from harness.engines import EnginePool
from harness.supervisor import supervise

from .conftest import run_until_killed

FINISHED = 12
"""Of the 16 requests of a step: 4 prompts, 4 samples each."""
KILL = {"fault": "kill", "target": "driver", "at": "generate.request", "step": 2, "nth": FINISHED}


class Pair(NamedTuple):
    """A run, its killed twin, and what was journaled of the killed step when it was killed."""

    whole: list[Record]
    killed: list[Record]
    left: dict[str, list[Generation]]
    directory: Path


def journaled(run_dir: Path) -> dict[str, list[Generation]]:
    """{request: what its lines hold} of the step that follows step 1."""
    found: dict[str, list[Generation]] = {}
    for path in (run_dir / "rollouts").glob("0000000001-*.log"):
        for line in path.read_bytes().splitlines(keepends=True):
            decoded = decode_line(line)
            assert decoded is not None, "only a power cut tears lines"
            found.setdefault(decoded[0], []).append(decoded[1])
    return found


@pytest.fixture(scope="module")
def pair(configure: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Its engine samples by position, and requests go on after the tokens that were drawn.

    (That finished generations are reused where it does not is seen in test_kills.py.)
    """
    folder = tmp_path_factory.mktemp("rollouts")
    plan = folder / "plan.json"
    plan.write_text(FaultPlan.model_validate({"faults": [KILL]}).model_dump_json())
    runs = []
    for name in ("rollouts", "rollouts-killed"):
        config = configure(name, **{"trainer.max_training_steps": 3})
        assert config.engines is not None
        runs.append(config.model_copy(update={"engines": config.engines.model_copy(update={"continuation": True})}))
    whole, killed = runs
    with EnginePool(whole, folder) as pool:
        supervise(whole, pool)
        run_until_killed(killed, pool, plan)
        left = journaled(killed.run_dir)
        supervise(killed, pool, plan)
    yield Pair(read_journal(whole.run_dir), read_journal(killed.run_dir), left, killed.run_dir)


def last(records: Sequence[Record], step: int) -> StepDone:
    return [r.event for r in records if isinstance(r.event, StepDone) and r.event.step == step][-1]


def test_the_killed_run_is_identical_and_generates_only_what_was_not(pair: Pair) -> None:
    verdict = compare(pair.whole, pair.killed)
    assert verdict.outcome == "identical", verdict.reasons
    untouched, resumed = last(pair.whole, 2), last(pair.killed, 2)
    assert untouched.tokens_reused == 0 < untouched.tokens_generated
    assert resumed.tokens_generated + resumed.tokens_reused == untouched.tokens_generated
    finished = [line for lines in pair.left.values() for line in lines if line.stop_reason is not None]
    begun = [lines for lines in pair.left.values() if all(line.stop_reason is None for line in lines)]
    assert len(finished) == FINISHED
    heard = sum(len(line.tokens) for lines in begun for line in lines)
    assert resumed.tokens_reused >= 0.95 * (sum(len(line.tokens) for line in finished) + heard)
    print(f"{FINISHED} finished, {len(begun)} begun ({heard} tokens): {resumed.tokens_reused} of "
          f"{untouched.tokens_generated} tokens reused")  # fmt: skip
    assert last(pair.killed, 3).tokens_reused == 0
    assert list((pair.directory / "rollouts").iterdir()) == [], "the run is complete"
