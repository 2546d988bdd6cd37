"""What can be planted: `DEFECTS[name]` is put into every process of a run that meets a fault, once it says who it is.

A defect strikes in what the second attempt brings back. The product's own checks of a restore are taken out with it, as
a bug would have slipped past them too: that the product sees most of them by itself is tested elsewhere
(tests/stack/test_whole_state.py). Here the verdict has to see them.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from chaos import agent

VARIABLE = "HARNESS_PLANTED"
"""Names the defect in the environment of the run's processes."""

KILL_RANK = {"fault": "kill", "target": "policy:1", "at": "train.optimizer", "step": 3}
KILL_DRIVER = {"fault": "kill", "target": "driver", "at": "generate.request", "step": 3, "nth": 2}
KILL_DRIVER_LATER = KILL_DRIVER | {"step": 4}


class Defect(NamedTuple):
    """`plant()` runs in the driver and in each rank; `reason` and `text` are what the verdict must say of it."""

    plant: Callable[[], None]
    reason: str
    text: str
    fault: dict[str, Any] = KILL_RANK
    whole: bool = False
    """Needs a critic and a KL controller."""
    uneven: bool = False
    """Needs ranks whose streams are not the same: SkyRL seeds them alike."""


_DRAWN: list[bool] = []
_RESTORED: list[bool] = []
"""Not empty once this driver holds a restored State."""


def uneven(phase: str, where: dict[str, Any]) -> None:
    """Named by HARNESS_PHASE_LISTENER in baselines: rank 1 draws once more than rank 0 before its first step."""
    if (phase, where.get("step"), where.get("rank")) == ("train.forward_backward", 1, 1) and not _DRAWN:
        import torch

        torch.rand(1)
        _DRAWN.append(True)


def listen(phase: str, where: dict[str, Any]) -> None:
    """Named by HARNESS_PHASE_LISTENER in the place of `chaos.agent:listen`."""
    if DEFECTS[os.environ[VARIABLE]].uneven:
        uneven(phase, where)
    if phase in ("driver.started", "worker.started") and where["role"] in ("driver", "policy", "critic", "ref"):
        _believe_restores()
        DEFECTS[os.environ[VARIABLE]].plant()
    if phase == "restore.end":
        _RESTORED.append(True)
    agent.listen(phase, where)


def _trainer(module: str) -> Any:
    """Imported only in the run's processes: SkyRL takes ten seconds."""
    return importlib.import_module(f"trainer.{module}")


def _believe_restores() -> None:
    _trainer("checkpoint").require_equal = lambda saved, held: None


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _after_restore_of_rank(change: Callable[[Any], None], lies: bool = False) -> Callable[[], None]:
    """`change(rank)` once it has restored; if it `lies`, behind the back of what it says that it holds."""

    def plant() -> None:
        def wrapped(restore: Any) -> Any:
            def restore_state(rank: Any) -> Any:
                expected, _ = restore(rank)
                change(rank)
                return expected, expected if lies else rank.digest_state()

            return restore_state

        _wrap(_trainer("workers").StatefulRank, "restore_state", wrapped)

    return plant


def _leave_out(entry: str) -> Defect:
    def plant() -> None:
        state = _trainer("state")
        keep: Callable[[Any, Any], None] = lambda owner, captured: None  # noqa: E731
        state.STATE[:] = [
            one if one.name != entry else one.__class__(**vars(one) | {"restore": keep}) for one in state.STATE
        ]

    fault = KILL_DRIVER if entry.startswith("driver/") else KILL_RANK
    whole = entry.startswith("critic/") or entry == "driver/kl_controller"
    return Defect(plant, "restored wrongly", f": {entry} was", fault, whole)


def _epoch_off_by_one() -> None:
    def wrapped(seek: Any) -> Any:
        return lambda loader, position: seek(loader, position | {"epoch": position["epoch"] + 1})

    _wrap(_trainer("data").EpochLoader, "seek", wrapped)


def _order_of_batches(change: Callable[[list[int]], list[int]]) -> Callable[[], None]:
    """`change(order of an epoch)` from the restore on."""

    def plant() -> None:
        def wrapped(epoch_order: Any) -> Any:
            return lambda *args: change(epoch_order(*args)) if _RESTORED else epoch_order(*args)

        _wrap(_trainer("data"), "epoch_order", wrapped)

    return plant


def _one_again(order: list[int]) -> list[int]:
    """The first prompt of each batch of four is that of the batch before it."""
    return [order[index - 4] if index % 4 == 0 and index else order[index] for index in range(len(order))]


def _swap_rng() -> None:
    def wrapped(fetch: Any) -> Any:
        def fetch_entries(entries: Any, owner: Any, place: Any, shards: Any, read: Any, step: int) -> Any:
            swapped = {name: s[::-1] if name == "policy/rng" else s for name, s in shards.items()}
            return fetch(entries, owner, place, swapped, read, step)

        return fetch_entries

    _wrap(_trainer("workers"), "fetch_entries", wrapped)


def _flip_lowest_bit(rank: Any) -> None:
    import torch

    for name, tensor in _trainer("rank_state").capture_parameters(rank).tensors.items():
        if "lora_B" in name and tensor.numel() and rank._rank == 0:
            bits = tensor.view(-1).view(torch.int32)
            bits[0] = bits[0] ^ 1
            return


def _adapter_twice() -> None:
    import torch

    def wrapped(sync: Any) -> Any:
        async def save_and_sync(rank: Any, *args: Any, **kwargs: Any) -> None:
            held = _trainer("rank_state").capture_parameters(rank).tensors if rank._fetched_once else {}
            scaled = [tensor for name, tensor in held.items() if "lora_B" in name]
            with torch.no_grad():
                for tensor in scaled:
                    tensor.mul_(2)
                await sync(rank, *args, **kwargs)
                for tensor in scaled:
                    tensor.div_(2)

        return save_and_sync

    def remember(restore: Any) -> Any:
        def restore_state(rank: Any) -> Any:
            rank._fetched_once = True
            return restore(rank)

        return restore_state

    workers = _trainer("workers")
    workers.StatefulRank._fetched_once = False
    _wrap(workers._PolicyRank, "_save_lora_adapters_and_sync", wrapped)
    _wrap(workers.StatefulRank, "restore_state", remember)


def _generation_of_the_step_before() -> None:
    def wrapped(begin: Any) -> Any:
        return lambda client, phase, step: begin(client, phase, step - int(bool(_RESTORED)))

    _wrap(_trainer("generation").SeededClient, "begin", wrapped)


def _older(run: Any) -> Any:
    """The manifest of the step before the one that the attempt says it resumed from."""
    from checkpointing.history import valid_commits
    from checkpointing.manifest import get_manifest

    assert run.resumed is not None
    store = run.tiers.primary.store
    commits = [commit for commit in valid_commits(store) if commit.step == run.resumed[1].step - 1]
    return get_manifest(store, commits[0].manifest)


def _older_step() -> None:
    _trainer("checkpoint").resumed = _older


def _older_step_and_a_lie() -> None:
    def older(run: Any) -> Any:
        manifest = _older(run)
        return manifest.model_copy(update={"step": run.resumed[1].step})

    _trainer("checkpoint").resumed = older


def _step_again() -> None:
    def wrapped(restore: Any) -> Any:
        return lambda trainer, captured: setattr(trainer, "global_step", captured.data["global_step"] - 1)

    state = _trainer("state")
    state.STATE[:] = [
        one if one.name != "driver/global_step" else one.__class__(**vars(one) | {"restore": wrapped(one.restore)})
        for one in state.STATE
    ]


def _kill_nobody() -> None:
    from chaos.faults import kill

    kill.inject = lambda scene: None


LEFT_OUT = (
    "policy/parameters",
    "policy/optimizer",
    "policy/lr_scheduler",
    "policy/rng",
    "critic/parameters",
    "critic/optimizer",
    "critic/lr_scheduler",
    "driver/global_step",
    "driver/data_position",
    "driver/kl_controller",
    "driver/rng",
)
"""All that a run of this size moves. Not: `critic/rng` (its critic draws nothing), `driver/frozen_models` (nothing is
put back), `driver/dynamic_sampling` and `driver/callbacks` (empty here), `ref/parameters` (SkyRL moves no LoRA one)."""

DEFECTS: dict[str, Defect] = {f"{entry} left out": _leave_out(entry) for entry in LEFT_OUT} | {
    "epoch off by one": Defect(_epoch_off_by_one, "diverged", "driver/data_position"),
    "ranks' RNG swapped": Defect(_swap_rng, "restored wrongly", "policy/rng", uneven=True),
    "scheduler stepped twice": Defect(
        _after_restore_of_rank(lambda rank: rank.scheduler.step()), "restored wrongly", "policy/lr_scheduler"
    ),
    "fresh optimizer": Defect(
        _after_restore_of_rank(lambda rank: rank.optimizer.state.clear()), "restored wrongly", "policy/optimizer"
    ),
    "adapter loaded twice": Defect(_adapter_twice, "diverged", "tokens"),
    "generation of the wrong step": Defect(_generation_of_the_step_before, "diverged", "tokens"),
    "prompt skipped": Defect(_order_of_batches(lambda order: order[1:] + order[:1]), "diverged", "prompts"),
    "prompt trained twice": Defect(_order_of_batches(_one_again), "diverged", "prompts"),
    "step trained twice": Defect(_step_again, "trained twice", "step 2", KILL_DRIVER),
    "one bit": Defect(_after_restore_of_rank(_flip_lowest_bit, lies=True), "diverged", "step 3"),
    "older step": Defect(_older_step, "restored another step", "step 2", KILL_DRIVER_LATER),
    "older step and a lie": Defect(_older_step_and_a_lie, "restored wrongly", "policy/parameters", KILL_DRIVER_LATER),
    "fault that does nothing": Defect(_kill_nobody, "not witnessed", "kill"),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Runs that meet faults inside the block have the defect `name`."""
    from harness import driver_process

    before = driver_process.LISTENER
    driver_process.LISTENER, os.environ[VARIABLE] = f"{__name__}:listen", name
    try:
        yield
    finally:
        driver_process.LISTENER = before
        del os.environ[VARIABLE]


@contextmanager
def uneven_streams() -> Iterator[None]:
    """Runs that meet no faults inside the block have ranks whose random streams differ."""
    os.environ["HARNESS_PHASE_LISTENER"] = f"{__name__}:uneven"
    try:
        yield
    finally:
        del os.environ["HARNESS_PHASE_LISTENER"]
