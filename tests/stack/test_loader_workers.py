"""The data loader with real worker processes, which fetch ahead of what has been trained on."""

import signal
import time

import pytest

from chaos.process import ProcessId, loader_workers
from checkpointing.errors import WorkerLost
from trainer.data import EpochLoader
from trainer.failures import first_cause

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


def test_a_worker_that_is_killed_is_a_process_lost_and_no_bug_of_the_user_s() -> None:
    loaded = loader(2)
    next(iter(loaded))
    with pytest.raises(RuntimeError) as caught:
        loader_workers(ProcessId.current())[0].send(signal.SIGKILL)
        for _ in range(6000):  # torch raises wherever this process is, once it hears of it
            time.sleep(0.01)
    loaded.close()
    cause = first_cause(caught.value, None)
    assert isinstance(cause, WorkerLost) and "killed by signal" in str(cause)
