"""The data loader with real worker processes, which fetch ahead of what has been trained on."""

import pytest

from trainer.data import EpochLoader

pytestmark = pytest.mark.stack


class Ids:
    """Prompts that are their own index. At module level, since workers are spawned and import it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, items: list[int]) -> list[int]:
        return items


def loader(workers: int) -> EpochLoader:
    return EpochLoader(Ids(), 2, 4, seed=7, num_workers=workers)


def test_workers_change_neither_the_order_nor_the_position() -> None:
    whole = [batch for alone in [loader(0)] for _ in range(4) for batch in alone]
    ahead = loader(2)
    batches = iter(ahead)
    taken = [next(batches) for _ in range(3)]
    assert ahead.position()["batch"] == 3, "what was fetched ahead is not what was handed out"
    taken += list(batches)
    assert taken == whole[:6]
    taken += list(ahead)
    resumed = loader(0)
    resumed.seek(ahead.position())
    assert taken + [batch for _ in range(2) for batch in resumed] == whole
