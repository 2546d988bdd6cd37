"""The simulation itself: schedules hold, replay exactly, and find what is planted. (`make simulate` runs thousands.)"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.__main__ import _one, shrink, simulate
from tests.simulation.faults import draw
from tests.simulation.mutations import MUTATIONS

SEEDS = range(150)

FOUND_WITHIN = 20
"""Schedules, from `FROM` on: most of the planted defects show in the first, and a few need what is drawn rarely."""

FROM = {"lost_answer_is_a_defeat": 180, "budget_off": 50, "breaker_off": 100, "sleeper_takes_the_run": 310}

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Product code warns of what it survives."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def test_every_invariant_holds_and_faults_do_happen() -> None:
    outcomes = [_one(seed) for seed in SEEDS]
    assert [(one.seed, one.failure) for one in outcomes if one.failure] == []
    assert sum(one.faults for one in outcomes) > len(SEEDS)


def test_a_seed_gives_the_same_trace_each_time_and_in_each_process() -> None:
    seed = max((_one(seed) for seed in range(12)), key=lambda one: one.faults).seed
    first, second = simulate(draw(seed))[0].world.trace, simulate(draw(seed))[0].world.trace
    assert first == second
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--schedules", "1"]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[: len(first)] == [f"{moment:12.4f}  {who:18}  {what}" for moment, who, what in first]
    assert "every invariant held" in said


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_defect_is_found(name: str) -> None:
    first = FROM.get(name, 0)
    for seed in range(first, first + FOUND_WITHIN):
        schedule = draw(seed)
        if simulate(schedule, MUTATIONS[name])[1] is not None:
            assert simulate(schedule)[1] is None, "it must be the defect that is found"
            return
    pytest.fail(f"{FOUND_WITHIN} schedules did not find it")


def test_a_failure_is_shrunk_to_what_is_enough_for_it() -> None:
    mutation = MUTATIONS["restore_takes_an_older_one"]
    failing = (schedule for seed in SEEDS if len((schedule := draw(seed)).faults) > 2)
    schedule = next(one for one in failing if simulate(one, mutation)[1])
    fewer = shrink(schedule, mutation)
    assert len(fewer.faults) < len(schedule.faults)
    assert simulate(fewer, mutation)[1] is not None
