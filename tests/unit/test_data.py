"""Data position: the rows of known faults that are about skipping, repeating or reordering prompts after a resume."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from checkpointing.errors import CheckpointError
from trainer.data import EpochLoader, epoch_order


class Ids:
    """Prompts that are their own index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, items: list[int]) -> list[int]:
        return items


def loader(size: int = 20, batch: int = 2, epochs: int = 3) -> EpochLoader:
    return EpochLoader(Ids(size), batch, epochs, seed=7)


def skyrl_loop(data: EpochLoader, done: int, stop_after: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """The control flow of SkyRL's `train()` around the loader: (step, batch) of every step taken."""
    step = done
    for _ in range(step // len(data), data.epochs):
        for batch in data:
            step += 1
            yield step, batch
            if step == stop_after:
                return


def unbroken(**kwargs: Any) -> list[tuple[int, list[int]]]:
    return list(skyrl_loop(loader(**kwargs), 0))


@pytest.mark.parametrize("stop", [1, 9, 10, 11, 19, 20, 29, 30])
def test_resume_takes_exactly_the_steps_that_are_left(stop: int) -> None:
    whole, first = unbroken(), loader()
    before = list(skyrl_loop(first, 0, stop))
    second = loader()
    second.seek(first.position())
    after = list(skyrl_loop(second, stop))
    assert before + after == whole
    assert len(whole) == 30


@pytest.mark.parametrize("stops", [[3, 5], [3, 4, 5], [10, 20], [10, 11, 25]])
def test_resume_of_a_resume(stops: list[int]) -> None:
    taken: list[tuple[int, list[int]]] = []
    position, done = None, 0
    for stop in [*stops, None]:
        data = loader()
        if position is not None:
            data.seek(position)
        taken += list(skyrl_loop(data, done, stop))
        position, done = data.position(), taken[-1][0]
    assert taken == unbroken()


def test_end_of_epoch_state_starts_the_next_epoch_in_full() -> None:
    whole = [batch for _, batch in unbroken(size=12, epochs=4)]
    first = loader(size=12, epochs=4)
    list(first), list(first)
    second = loader(size=12, epochs=4)
    second.seek(first.position())
    rest = [batch for _ in range(2) for batch in second]
    assert rest == whole[12:]
    assert len(rest) == 12


def test_each_epoch_has_its_own_order_and_every_prompt_once() -> None:
    orders = [epoch_order(10, seed=7, epoch=epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert epoch_order(10, seed=7, epoch=1) == orders[1]
    assert epoch_order(10, seed=8, epoch=1) != orders[1]


def test_the_order_does_not_depend_on_global_random_state() -> None:
    first = unbroken()
    random.seed(1)
    assert unbroken() == first


def test_no_prompt_is_lost_or_repeated_over_a_kill_in_mid_epoch() -> None:
    first = loader(epochs=1)
    before = [batch for _, batch in skyrl_loop(first, 0, 5)]
    second = loader(epochs=1)
    second.seek(first.position())
    ids = [index for batch in before + list(second) for index in batch]
    assert sorted(ids) == list(range(20))


@pytest.mark.parametrize(("size", "batch"), [(22, 2), (20, 4)])
def test_other_data_or_batch_size_is_refused(size: int, batch: int) -> None:
    with pytest.raises(CheckpointError, match="data position"):
        loader(size=size, batch=batch).seek(loader().position())


def test_after_the_last_epoch_there_is_nothing_and_that_is_known() -> None:
    data = loader(epochs=2)
    assert not data.exhausted
    list(data), list(data)
    assert data.exhausted
    assert list(data) == []
