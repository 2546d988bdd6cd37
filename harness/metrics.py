"""What Prometheus is told of a run, all of it derived from the run's directory: `FAMILIES` says what there is.

`harness/tallies.py` counts what the journal says, `harness/status.py` knows how the run is, `exporter.py` serves it.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import from_json

from checkpointing.errors import ConfigError
from checkpointing.progress import PHASE_OF
from harness.runs import recorded_run
from harness.status import RunView, Status
from harness.tallies import Tallies, Values

STATES = ("running", "stopped", "complete")
OUTCOMES = ("passed", "failed", "inconclusive")
PHASES = sorted(set(PHASE_OF.values()))


class Family(NamedTuple):
    """`labels` besides `run`, the name of the run directory."""

    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()


FAMILIES = {
    # Is it training?
    "harness_run_state": Family("gauge", "1 for what the journal says of the run.", ("state",)),
    "harness_run_start_timestamp_seconds": Family("gauge", "When the run began."),
    "harness_last_sign_timestamp_seconds": Family("gauge", "When journal or step loop were last heard of."),
    "harness_attempt": Family("gauge", "Number of the newest attempt."),
    "harness_ranks": Family("gauge", "Ranks of the newest attempt."),
    "harness_step": Family("gauge", "Newest step done."),
    "harness_step_timestamp_seconds": Family("gauge", "When a step was last done."),
    "harness_steps_planned": Family("gauge", "Steps that the whole run is to take."),
    "harness_steps_total": Family("counter", "Steps done, those that were done again too."),
    "harness_seconds_per_step": Family("gauge", "From the end of a step to the end of the next, over recent ones."),
    "harness_phase": Family("gauge", "1 for the phase that the step loop is in.", ("phase",)),
    "harness_phase_start_timestamp_seconds": Family("gauge", "When the step loop came into its phase."),
    "harness_phase_seconds": Family("gauge", "How long the phase took when it was last timed.", ("phase",)),
    "harness_reward": Family("gauge", "Mean raw reward of the newest step."),
    "harness_loss": Family("gauge", "Policy loss of the newest step."),
    "harness_engine_serving": Family("gauge", "0 from the loss of an engine until it serves again.", ("engine",)),
    "harness_slowest_rank_ratio": Family("gauge", "Time of the slowest rank over the median, at what each does alone."),
    # Is it safe?
    "harness_checkpoint_local_step": Family("gauge", "Step of the newest checkpoint on the primary tier."),
    "harness_checkpoint_local_timestamp_seconds": Family("gauge", "When that checkpoint was committed."),
    "harness_checkpoint_durable_step": Family("gauge", "Step of the newest checkpoint on the last tier."),
    "harness_checkpoint_durable_timestamp_seconds": Family("gauge", "When that checkpoint was committed."),
    "harness_checkpoint_bytes": Family("gauge", "Size of the newest checkpoint, shared bytes included."),
    "harness_saves_total": Family("counter", "Checkpoints made."),
    "harness_save_stopped_seconds_total": Family("counter", "Time that training stood still for saves."),
    "harness_saves_skipped_total": Family("counter", "Saves left out because the one before was being written."),
    "harness_checkpoints_rejected_total": Family("counter", "Checkpoints that could not be resumed from."),
    "harness_tier_written_bytes_total": Family("counter", "New bytes written to the tier.", ("tier",)),
    "harness_tier_write_seconds_total": Family("counter", "Time spent writing to the tier.", ("tier",)),
    "harness_tier_freed_bytes_total": Family("counter", "Bytes that retention deleted on the tier.", ("tier",)),
    "harness_tier_backlog": Family("gauge", "Checkpoints that wait to be carried to the tier.", ("tier",)),
    "harness_tier_failing": Family("gauge", "1 from a refusal of the tier until it has taken a checkpoint.", ("tier",)),
    "harness_tier_failures_total": Family("counter", "Refused saves; outages; refused deletes.", ("tier",)),
    "harness_disk_free_bytes": Family("gauge", "Free on the file system of the run directory."),
    "harness_disk_limit_bytes": Family("gauge", "supervision.disk_low_bytes."),
    # What happened?
    "harness_recoveries_total": Family("counter", "What was lost and replaced, and why.", ("rung", "cause")),
    "harness_attempts_without_progress": Family("gauge", "Failed attempts in a row that got no step further."),
    "harness_exit_code": Family("gauge", "What the supervisor stopped with, while it is stopped."),
    "harness_divergences_total": Family("counter", "Attempts that ended because a step came out differently."),
    "harness_generations_rejected_total": Family("counter", "Answers of engines that could not be answers."),
    "harness_straggler_timestamp_seconds": Family("gauge", "When a rank was last found slow.", ("role", "rank")),
    "harness_verdict": Family("gauge", "1 for the verdict of the drill that this run was part of.", ("outcome",)),
    # What will it cost?
    "harness_useful_ratio": Family("gauge", "Time in steps that were kept, of all time since the run began."),
    "harness_down_seconds_total": Family("counter", "From a loss that ended an attempt to the next step done."),
    "harness_repeated_steps_total": Family("counter", "Steps done that had been done before."),
    "harness_repeated_seconds_total": Family("counter", "Time spent in those."),
    "harness_tokens_generated_total": Family("counter", "Tokens sampled by engines."),
    "harness_tokens_reused_total": Family("counter", "Tokens taken over from earlier attempts."),
    "harness_expected_end_timestamp_seconds": Family("gauge", "When the last step will be done at the present rate."),
}


class RunMetrics(Collector):
    """Each look costs what has been added to the journal since the one before. Raises like `RunView`."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir
        self._view: RunView | None = None

    def collect(self) -> Iterator[Metric]:
        values = self._values()
        for name, family in FAMILIES.items():
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(name, family.text, labels=("run", *family.labels))
            for labels, value in values.of(name):
                metric.add_metric([self._directory.resolve().name, *labels], value)
            yield metric

    def _values(self) -> Values:
        if not any((self._directory / "journal").glob("*.jsonl")):
            return Values()  # nothing has begun
        try:
            if self._view is None:
                self._view = RunView(str(self._directory))
                self._tallies = Tallies(self._view.durable)
            status = self._view.look(self._tallies.take)
        except Exception:
            self._view = None  # some records may have been read and not taken: begin anew
            raise
        values = self._tallies.values.copy()
        self._tell_status(values, status)
        self._tell_place(values, status)
        self._tell_directory(values)
        return values

    def _tell_status(self, values: Values, status: Status) -> None:
        for state in STATES:
            values.set("harness_run_state", float(state == status.state), state)
        told = {
            "harness_last_sign_timestamp_seconds": status.last_sign,
            "harness_attempt": status.attempts,
            "harness_steps_planned": status.planned,
            "harness_step": status.step,
            "harness_seconds_per_step": status.seconds_per_step,
            "harness_reward": status.reward,
            "harness_checkpoint_local_step": status.newest_local,
            "harness_checkpoint_local_timestamp_seconds": self._tallies.committed.get(status.newest_local or 0),
            "harness_checkpoint_durable_step": status.newest_durable,
            "harness_checkpoint_durable_timestamp_seconds": self._tallies.committed.get(status.newest_durable or 0),
            "harness_expected_end_timestamp_seconds": status.expected_end,
            "harness_useful_ratio": self._tallies.useful.share(time.time() if status.state == "running" else None),
        }
        for name, value in told.items():
            if value is not None:
                values.set(name, value)

    def _tell_place(self, values: Values, status: Status) -> None:
        assert self._view is not None
        place = self._view.place() if status.state == "running" else None
        if place is not None:
            values.set("harness_phase_start_timestamp_seconds", place.since)
        for phase in PHASES:
            values.set("harness_phase", float(place is not None and place.phase == phase), phase)

    def _tell_directory(self, values: Values) -> None:
        values.set("harness_disk_free_bytes", shutil.disk_usage(self._directory).free)
        with suppress(ConfigError):  # a run without a supervisor
            config = recorded_run(self._directory).config
            values.set("harness_disk_limit_bytes", config.supervision.disk_low_bytes)
            for engine in range(config.engines.count if config.engines else 0):
                serving = engine not in self._tallies.engines_lost
                values.set("harness_engine_serving", float(serving), str(engine))
        with suppress(OSError, ValueError):  # of no drill; or just being written
            drill = self._directory.resolve().parent / "verdict.json"
            verdict = from_json(drill.read_bytes())["judgement"]["outcome"]
            for outcome in OUTCOMES:
                values.set("harness_verdict", float(outcome == verdict), outcome)
