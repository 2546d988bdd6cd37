"""The actor groups of SkyRL that hold State, and how all their ranks are asked at once."""

from typing import Any

import ray

from checkpointing.manifest import Shard
from trainer.state import entries_of

Shards = dict[str, list[Shard]]
"""{entry: its shards in rank order}"""


def groups(trainer: Any) -> dict[str, Any]:
    """{role: SkyRL actor group}, the roles that have something to capture."""
    all_groups: dict[str, Any] = trainer.dispatch._actor_groups
    return {role: group for role, group in all_groups.items() if entries_of(role, trainer.cfg.trainer)}


def ask_all_ranks(trainer: Any, method: str, *args: Any) -> dict[str, list[Any]]:
    """Call `method` on every rank of every group at once. {role: answers in rank order}."""
    calls = {}
    for role, group in groups(trainer).items():
        trainer.dispatch._ensure_on_gpu(role)
        calls[role] = [getattr(actor, method).remote(*args) for actor in group._actor_handlers]
    return {role: ray.get(answers) for role, answers in calls.items()}


def by_entry(answers: dict[str, list[dict[str, Shard]]]) -> Shards:
    gathered: Shards = {}
    for ranks in answers.values():
        for shards in ranks:
            for name, shard in shards.items():
                gathered.setdefault(name, []).append(shard)
    return gathered
