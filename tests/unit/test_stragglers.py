"""A rank that is slow at what it does alone is told of; equal ranks, noise, and a rank without peers never are."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.events import RankStraggling
from checkpointing.journal import Journal, read_journal
from trainer import steps
from trainer.steps import StepJournal
from trainer.stragglers import MORE, RATIO, STEPS, Straggler, Stragglers, probe_seconds, slowest_ratio, straggling

BASES = st.floats(1e-4, 1e3)
WORLDS = st.integers(2, 16)


def told(history: list[list[float]], role: str = "policy") -> list[list[Straggler]]:
    stragglers = Stragglers()
    return [stragglers.after({role: step}) for step in history]


@given(BASES, WORLDS, st.integers(1, 10))
def test_equal_ranks_never_straggle(base: float, world: int, count: int) -> None:
    assert told([[base] * world] * count) == [[]] * count
    assert slowest_ratio({"policy": [base] * world}) == pytest.approx(1.0)


@given(BASES, WORLDS, st.data())
def test_noise_is_no_straggler(base: float, world: int, data: st.DataObject) -> None:
    """Every rank within its peers' `RATIO`, or a fraction of a second beyond it, or far beyond it now and then."""
    noisy = st.lists(st.floats(base, base * RATIO), min_size=world, max_size=world)
    history = data.draw(st.lists(noisy, min_size=STEPS, max_size=10))
    assert all(new == [] for new in told(history))
    instants = st.lists(st.floats(1e-6, MORE), min_size=world, max_size=world)
    assert all(new == [] for new in told(data.draw(st.lists(instants, min_size=STEPS, max_size=10))))
    assert told([[0.001, MORE]] * STEPS) == [[]] * STEPS
    spiked = [list(step) for step in history]
    for number, step in enumerate(spiked):
        if number % STEPS:
            step[0] += 10 * RATIO * base + 1
    assert all(new == [] for new in told(spiked))


@given(BASES, WORLDS, st.data())
def test_a_slow_rank_is_told_of_once_until_it_is_over(base: float, world: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, world - 1))
    equal = [base] * world
    late = [base * 1.01 if rank != slow else base * RATIO * 1.1 + 2 * MORE for rank in range(world)]
    history = [equal] + [late] * (STEPS + 2) + [equal] + [late] * STEPS
    new = told(history)
    expected: list[list[str]] = [[]] * STEPS + [["told"]] + [[]] * (STEPS + 2) + [["told"]]
    assert [["told"] * len(one) for one in new] == expected
    (first,) = new[STEPS]
    assert (first.role, first.rank, first.seconds) == ("policy", slow, late[slow])
    assert first.median_of_others == base * 1.01
    assert slowest_ratio({"policy": late}) == late[slow] / (base * 1.01)


@given(st.lists(BASES, min_size=STEPS, max_size=8))
def test_a_rank_without_peers_is_compared_with_nobody(seconds: list[float]) -> None:
    assert all(new == [] for new in told([[one] for one in seconds]))
    assert slowest_ratio({"policy": [seconds[0]], "critic": [seconds[1]]}) is None


def test_roles_are_not_compared_and_two_may_straggle_at_once() -> None:
    step = {"policy": [1.0, 9.0, 1.0, 1.0, 8.0], "critic": [100.0, 100.0], "ref": [0.01, 0.01]}
    assert [(one.role, one.rank) for one in straggling([step] * STEPS)] == [("policy", 1), ("policy", 4)]
    assert straggling([step] * (STEPS - 1)) == []
    assert straggling([{"policy": [1.0, 9.0]}, {"policy": [9.0, 1.0]}, {"policy": [1.0, 9.0]}]) == []


def test_the_probe_measures_and_draws_nothing() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)
    assert probe_seconds(torch.device("cpu")) > 0
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert str(np.random.get_state(legacy=True)) == str(states[2])


def test_the_journal_and_the_metrics_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "driver", 1)
    run: Any = SimpleNamespace(journal=journal)
    trainer: Any = SimpleNamespace(global_step=0, nodes={"policy": ["a", "b"], "critic": ["a"]}, all_metrics={})
    monkeypatch.setattr(steps, "ask_all_ranks", lambda *_: {"policy": [0.5, 4.0], "critic": [70.0]})
    listener = StepJournal(run)
    for step in range(1, STEPS + 3):
        trainer.global_step = step
        listener._look_for_stragglers(trainer)
    journal.close()
    assert trainer.all_metrics == {"timing/slowest_rank_ratio": 8.0}
    assert [record.event for record in read_journal(tmp_path)] == [
        RankStraggling(step=STEPS, role="policy", rank=1, node="b", seconds=4.0, median_of_others=0.5)
    ]
