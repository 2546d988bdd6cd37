"""What may go wrong in a schedule, and how a schedule is drawn from its seed."""

import random
from typing import NamedTuple

from checkpointing.retention import Keep

STEPS = (
    "generate.begin",
    "reward.begin",
    "forward.begin",
    "train.begin",
    "step.trained",
    "save.wait",
    "save.begin",
    "weight_sync.begin",
)
STARTS = ("driver.started", "attempt.opened", "restore.begin", "restore.end", "finish.begin")
SAVES = ("save.write", "save.before_manifest", "save.before_commit", "save.committed", "save.shard_written")
STORES = ("store.put_written", "store.put_renamed", "store.create_written", "store.create_linked")
CARRIES = ("replicate.blob", "replicate.before_manifest", "replicate.before_commit", "replicate.committed")
PRUNES = ("prune.commit_deleted", "prune.blob_deleted", "prune.manifest_deleted")
DISK = ("disk.create", "disk.write", "disk.fsync", "disk.rename", "disk.link", "disk.unlink", "disk.mkdir")
S3 = ("s3.put", "s3.create", "s3.get", "s3.list", "s3.delete", "s3.put.done", "s3.create.done", "s3.delete.done")

KILLS = ("kill", "kill", "kill driver", "kill keeper", "kill replicator", "kill supervisor", "power", "rank lost")
HANGS = ("freeze", "cut off", "cut off", "cut off")
STORAGE = ("down", "denied", "errors", "lost", "lost", "late", "slow", "disk full")
OTHERS = ("damage", "damage", "clock", "stop")


class Fault(NamedTuple):
    """At the `number`-th time that a process is at `place` ("" is anywhere), `kind` happens. `amount` is in [0, 1)."""

    kind: str
    place: str
    number: int
    amount: float

    def __str__(self) -> str:
        return f"{self.kind} at {self.place or 'any point'} #{self.number} ({self.amount:.4f})"


class Poison(NamedTuple):
    """The step fails in `phase`, `times` times, or for ever (0). In "attempt.opened" every start does."""

    step: int
    phase: str
    times: int
    kind: str
    """ "kill driver", "rank lost", "freeze" or "non-finite" """


class Schedule(NamedTuple):
    """All that a run depends on. `seed` decides what is not written here: delays, jitter, which of two goes first."""

    seed: int
    tiers: tuple[str, ...]
    keep: dict[str, Keep]
    steps: int
    every: int
    ranks: int
    backlog: int
    wait_when_busy: bool
    poison_after: int
    restarts_per_hour: int
    restore_non_finite: bool
    faults: tuple[Fault, ...]
    poison: Poison | None


def draw(seed: int) -> Schedule:
    rng = random.Random(f"schedule {seed}")
    tiers = rng.choice([("file",), ("file", "s3"), ("file", "s3"), ("file", "s3", "s3-2"), ("s3",), ("s3", "s3-2")])
    keep = {tier: _keep(rng) for tier in tiers if rng.random() < 0.7}
    steps = rng.randint(2, 5)
    return Schedule(
        seed=seed,
        tiers=tiers,
        keep=keep,
        steps=steps,
        every=rng.choice([1, 1, 1, 2]),
        ranks=rng.choice([1, 2]),
        backlog=rng.choice([1, 2, 4]),
        wait_when_busy=rng.random() < 0.8,
        poison_after=rng.choice([1, 2, 3]),
        restarts_per_hour=rng.choice([3, 3, 6, 20]),
        restore_non_finite=rng.random() < 0.7,
        faults=tuple(_fault(rng, tiers) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 6]))),
        poison=_poison(rng, steps) if rng.random() < 0.15 else None,
    )


def _keep(rng: random.Random) -> Keep:
    return Keep(newest=rng.choice([1, 1, 2, 3]), every=rng.choice([None, None, 2, 3]))


def _fault(rng: random.Random, tiers: tuple[str, ...]) -> Fault:
    kind = rng.choice(rng.choice([KILLS, KILLS, HANGS, STORAGE, OTHERS]))
    places = [STEPS, STARTS, SAVES, PRUNES, ("",)]
    places += [STORES, DISK] if "file" in tiers else []
    places += [S3, S3] if len(tiers) > 1 or "file" not in tiers else []
    places += [CARRIES] if len(tiers) > 1 else []
    place = rng.choice(rng.choice(places))
    often = 600 if place == "" else 40 if place.startswith(("disk", "s3", "store")) else 5
    return Fault(kind, place, 1 + int(often * rng.random() ** 2), rng.random())


def _poison(rng: random.Random, steps: int) -> Poison:
    kind = rng.choice(["kill driver", "rank lost", "freeze", "non-finite"])
    phase = "step.trained" if kind == "non-finite" else rng.choice([*STEPS[:5], "attempt.opened", "attempt.opened"])
    return Poison(rng.randint(1, steps), phase, rng.choice([0, 0, 1, 2, 3, 5]), kind)
