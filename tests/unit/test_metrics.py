"""What a run's journal becomes for Prometheus, on journals that the product's own Journal has written."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from checkpointing.errors import FormatError
from checkpointing.events import (
    AttemptEnded,
    CheckpointCommitted,
    CheckpointRejected,
    CheckpointReplicated,
    CheckpointsCoalesced,
    CheckpointsPruned,
    EngineLost,
    EngineServing,
    Evaluated,
    GenerationRejected,
    HangDetected,
    MetricsLogged,
    RankStraggling,
    ReplicationFailed,
    RetentionFailed,
    RunFinished,
    RunStopped,
    SaveFailed,
    SaveSkipped,
)
from checkpointing.progress import ProgressFile, progress_path
from harness.config import Engines, RunConfig, Supervision
from harness.metrics import FAMILIES, RunMetrics
from harness.runs import leave_config
from tests.prometheus import alert_queries, dashboard_queries, metrics_in

from .journal_samples import LOST, STARTED, Told, begun, copied, done, saved

KILLED = AttemptEnded(exit_code=None, signal=9, reason="killed by SIGKILL")
REFUSED = ReplicationFailed(tier="file-2", reason="no space", newest_local=1, newest_there=None)


class Exported:
    """The metrics of a run, looked at again and again. The label `run` is left out of their names."""

    def __init__(self, run: Told) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(RunMetrics(run.directory))
        self._run = run.directory.name

    def __getitem__(self, name: str) -> float:
        return self.all()[name]

    def all(self) -> dict[str, float]:
        """{name{label="value"}: value}"""
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("run") == self._run
                inside = ",".join(f"{name}={value}" for name, value in labels.items())
                found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
        return found

    def recoveries(self) -> dict[str, float]:
        name = "harness_recoveries_total"
        return {key.removeprefix(name): value for key, value in self.all().items() if key.startswith(name) and value}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path / "a-run", monkeypatch)


@pytest.fixture
def exported(run: Told) -> Exported:
    return Exported(run)


def test_a_run_that_has_not_begun_says_nothing(exported: Exported) -> None:
    assert exported.all() == {}


def test_is_it_training(run: Told, exported: Exported) -> None:
    timings = {"timing/generate": 3.0, "timing/sync_weights": 0.5, "timing/slowest_rank_ratio": 1.25, "other": 1.0}
    run.say(1, STARTED, begun(), done(1), done(2), done(3, 0.5), MetricsLogged(step=3, metrics=timings))
    progress = ProgressFile(progress_path(run.directory, 1))
    progress.hear("generate.begin", {"step": 4})
    run.now += 5
    progress.hear("generate.request", {"step": 4})
    seen = exported.all()
    assert (seen["harness_run_state{state=running}"], seen["harness_run_state{state=complete}"]) == (1, 0)
    assert (seen["harness_run_start_timestamp_seconds"], seen["harness_last_sign_timestamp_seconds"]) == (
        1_000_010, 1_000_065,
    )  # fmt: skip
    assert (seen["harness_attempt"], seen["harness_ranks"]) == (1, 2)
    assert (seen["harness_step"], seen["harness_steps_planned"], seen["harness_steps_total"]) == (3, 100, 3)
    assert (seen["harness_step_timestamp_seconds"], seen["harness_seconds_per_step"]) == (1_000_050, 10)
    assert (seen["harness_reward"], seen["harness_loss"]) == (0.5, 0.5)
    assert (seen["harness_phase{phase=generate}"], seen["harness_phase{phase=train}"]) == (1, 0)
    assert seen["harness_phase_start_timestamp_seconds"] == 1_000_060, "a request is no new phase"
    assert (seen["harness_phase_seconds{phase=generate}"], seen["harness_phase_seconds{phase=weight sync}"]) == (3, 0.5)
    assert "harness_phase_seconds{phase=evaluate}" not in seen
    assert seen["harness_slowest_rank_ratio"] == 1.25
    assert seen["harness_expected_end_timestamp_seconds"] == 1_000_050 + 97 * 10
    progress.hear("generate.request", {"step": 5})
    assert exported["harness_phase_start_timestamp_seconds"] == 1_000_065, "the same phase of another step"
    run.say(1, done(100), RunFinished(planned_steps=100, last_step=100))
    seen = exported.all()
    assert (seen["harness_run_state{state=running}"], seen["harness_run_state{state=complete}"]) == (0, 1)
    assert seen["harness_phase{phase=generate}"] == 0 and "harness_expected_end_timestamp_seconds" not in seen


def test_is_it_safe(run: Told, exported: Exported) -> None:
    def committed(step: int) -> CheckpointCommitted:
        extra = {"bytes_total": 100, "bytes_new": 40, "stopped_seconds": 0.5, "seconds": 4.0}
        return saved(step).model_copy(update=extra)

    def carried(step: int) -> CheckpointReplicated:
        return copied(step).model_copy(update={"bytes_new": 30, "seconds": 2.0})

    run.say(1, STARTED, begun(), done(1), committed(1), done(2), committed(2), done(3), committed(3))
    assert "harness_checkpoint_durable_step" not in exported.all()
    run.say(1, carried(1), writer="replicator")
    seen = exported.all()
    assert (seen["harness_checkpoint_local_step"], seen["harness_checkpoint_durable_step"]) == (3, 1)
    assert seen["harness_checkpoint_local_timestamp_seconds"] == 1_000_080
    assert seen["harness_checkpoint_durable_timestamp_seconds"] == 1_000_040, "of its commit, not of its copy"
    assert (seen["harness_saves_total"], seen["harness_save_stopped_seconds_total"]) == (3, 1.5)
    assert seen["harness_checkpoint_bytes"] == 100
    for tier, (moved, took) in {"file": (120, 12), "file-2": (30, 2)}.items():
        assert seen[f"harness_tier_written_bytes_total{{tier={tier}}}"] == moved
        assert seen[f"harness_tier_write_seconds_total{{tier={tier}}}"] == took
    assert seen["harness_tier_backlog{tier=file-2}"] == 2 and "harness_tier_backlog{tier=file}" not in seen
    run.say(1, REFUSED, CheckpointsCoalesced(tier="file-2", commits=[committed(2).commit]), writer="replicator")
    seen = exported.all()
    assert (seen["harness_tier_backlog{tier=file-2}"], seen["harness_tier_failing{tier=file-2}"]) == (1, 1)
    assert (seen["harness_tier_failures_total{tier=file-2}"], seen["harness_tier_failing{tier=file}"]) == (1, 0)
    freed = CheckpointsPruned(tier="file", commits=[], bytes_freed=7)
    run.say(1, SaveFailed(step=4, failures=1, reason="no space"), SaveSkipped(step=5, in_flight=4), freed)
    run.say(1, RetentionFailed(tier="file-2", reason="no permission"), carried(3), writer="replicator")
    seen = exported.all()
    assert (seen["harness_tier_failing{tier=file}"], seen["harness_tier_failing{tier=file-2}"]) == (1, 0)
    assert (seen["harness_tier_failures_total{tier=file}"], seen["harness_tier_failures_total{tier=file-2}"]) == (1, 2)
    assert (seen["harness_saves_skipped_total"], seen["harness_tier_backlog{tier=file-2}"]) == (1, 0)
    assert seen["harness_tier_freed_bytes_total{tier=file}"] == 7
    assert seen["harness_disk_free_bytes"] > 0 and "harness_disk_limit_bytes" not in seen


def test_what_an_attempt_that_fell_back_had_saved_is_not_waited_for(run: Told, exported: Exported) -> None:
    run.say(1, STARTED, begun(), done(1), saved(1), done(2), saved(2))
    assert exported["harness_tier_backlog{tier=file-2}"] == 2
    rejected = CheckpointRejected(step=2, commit=saved(2).commit, reason="damaged", role="policy", rank=0)
    run.say(1, KILLED, writer="supervisor")
    run.say(2, begun(2), rejected)
    run.say(3, begun(1))
    seen = exported.all()
    assert (seen["harness_tier_backlog{tier=file-2}"], seen["harness_checkpoint_local_step"]) == (1, 1)
    assert seen["harness_checkpoints_rejected_total"] == 1
    assert exported.recoveries() == {"{rung=driver,cause=killed}": 1, "{rung=checkpoint,cause=unreadable}": 1}


def test_recoveries_by_rung_and_cause(run: Told, exported: Exported) -> None:
    hang = HangDetected(phase="train", step=2, seconds=9.0, limit=3.0, last_lines=[])
    ends = [
        (KILLED, "{rung=driver,cause=killed}"),
        (LOST.model_copy(update={"in_place": True}), "{rung=ranks,cause=worker_lost}"),
        (LOST, "{rung=driver,cause=worker_lost}"),
        (KILLED.model_copy(update={"engine": 1}), "{rung=driver,cause=engine}"),
        (KILLED.model_copy(update={"oom_kills": 2}), "{rung=driver,cause=out_of_memory}"),
        (LOST.model_copy(update={"exit_code": 25}), "{rung=driver,cause=non_finite}"),
        (LOST.model_copy(update={"exit_code": 1}), "{rung=driver,cause=head_lost}"),
        (LOST.model_copy(update={"exit_code": 14}), "{rung=driver,cause=error}"),
    ]
    run.say(1, STARTED, begun())
    for attempt, (ended, _) in enumerate(ends, 1):
        run.say(attempt, ended, writer="supervisor")
        run.say(attempt + 1, begun())
    assert exported.recoveries() == {name: 1 for _, name in ends}
    assert exported["harness_divergences_total"] == 1
    run.say(9, hang, KILLED, writer="supervisor")
    assert "{rung=driver,cause=hang}" not in exported.recoveries(), "not before there is another attempt"
    run.say(10, begun())
    assert exported.recoveries()["{rung=driver,cause=hang}"] == 1
    run.say(11, begun())  # nobody said that the one before had ended
    assert exported.recoveries()["{rung=run,cause=supervisor_lost}"] == 1
    run.say(11, KILLED, RunStopped(exit_code=23, reason="no further"), writer="supervisor")
    assert exported["harness_exit_code"] == 23
    run.say(12, begun())
    assert exported.recoveries()["{rung=run,cause=stopped}"] == 1 and "harness_exit_code" not in exported.all()
    run.say(12, AttemptEnded(exit_code=0, signal=None, reason="complete"), writer="supervisor")
    run.say(13, begun())
    assert sum(exported.recoveries().values()) == len(ends) + 3, "an attempt that ended well needs none"


def test_attempts_without_progress_count_as_the_supervisor_counts_them(run: Told, exported: Exported) -> None:
    run.say(1, STARTED, begun(), done(1))
    run.say(1, KILLED, writer="supervisor")
    assert exported["harness_attempts_without_progress"] == 0, "it did a step"
    for attempt in (2, 3):
        run.say(attempt, begun(), done(1))
        run.say(attempt, KILLED, writer="supervisor")
    assert exported["harness_attempts_without_progress"] == 2, "they did none that was new"
    run.say(4, begun(), done(1), done(2))
    assert exported["harness_attempts_without_progress"] == 0
    run.say(4, KILLED, KILLED, writer="supervisor")
    assert exported["harness_attempts_without_progress"] == 1
    run.say(4, RunStopped(exit_code=23, reason="no further"), writer="supervisor")
    assert exported["harness_attempts_without_progress"] == 0


def test_engines(run: Told, exported: Exported) -> None:
    config = RunConfig(run_dir=run.directory, device="cpu", engines=Engines(count=2), skyrl={})
    leave_config(run.directory, config.model_copy(update={"supervision": Supervision(disk_low_bytes=5)}))
    lost = EngineLost(engine=1, url="http://one", exit_code=-9, reason="engine 1 ended with -9", last_lines=[])
    run.say(1, STARTED, begun(), done(1), GenerationRejected(step=1, session="s", reason="no token", given_up=False))

    def serving() -> tuple[float, float]:
        return exported["harness_engine_serving{engine=0}"], exported["harness_engine_serving{engine=1}"]

    assert serving() == (1, 1)
    run.say(1, lost, writer="supervisor")
    assert serving() == (1, 0)
    run.say(1, EngineServing(url="http://another", seconds=1.0))
    assert serving() == (1, 0)
    run.say(1, done(2), EngineServing(url="http://one", seconds=30.0))
    assert serving() == (1, 1)
    run.say(1, lost.model_copy(update={"exit_code": None}), KILLED, writer="supervisor")
    run.say(2, begun(1))
    assert serving() == (1, 0)
    run.say(2, done(2))
    assert serving() == (1, 1), "it could not do a step without it"
    assert exported.recoveries() == {
        "{rung=engine,cause=ended}": 1, "{rung=engine,cause=silent}": 1, "{rung=driver,cause=killed}": 1,
    }  # fmt: skip
    assert (exported["harness_generations_rejected_total"], exported["harness_disk_limit_bytes"]) == (1, 5)


def test_what_will_it_cost(run: Told, exported: Exported) -> None:
    run.say(1, STARTED, begun(), Evaluated(step=0, metrics={}, tokens_generated=10))
    run.say(1, done(1).model_copy(update={"tokens_generated": 100}), done(2))
    run.say(1, KILLED, writer="supervisor")
    run.say(2, begun(1))
    assert exported["harness_down_seconds_total"] == 0, "it is not back yet"
    run.say(2, done(2).model_copy(update={"tokens_generated": 30, "tokens_reused": 70}), done(3))
    seen = exported.all()
    assert (seen["harness_steps_total"], seen["harness_step"]) == (4, 3)
    assert (seen["harness_repeated_steps_total"], seen["harness_repeated_seconds_total"]) == (1, 8)
    assert seen["harness_down_seconds_total"] == 20
    assert (seen["harness_tokens_generated_total"], seen["harness_tokens_reused_total"]) == (140, 70)
    assert seen["harness_useful_ratio"] == pytest.approx(3 * 8 / 80)
    run.now += 160
    assert exported["harness_useful_ratio"] == pytest.approx(3 * 8 / 240), "time goes on while nothing is said"
    run.say(3, begun(3), every=100)  # a supervisor that was killed says nothing
    run.say(3, done(4))
    assert exported["harness_down_seconds_total"] == 20 + 160 + 100 + 10
    run.say(3, KILLED, RunStopped(exit_code=75, reason="asked"), writer="supervisor")
    run.say(4, begun(4), done(5), every=1000)
    assert exported["harness_down_seconds_total"] == 290, "what somebody stopped is not down"


def test_stragglers_and_the_verdict_of_a_drill(run: Told, exported: Exported) -> None:
    slow = RankStraggling(step=3, role="policy", rank=1, node="n", seconds=4.0, median_of_others=1.0)
    run.say(1, STARTED, begun(), slow)
    assert exported["harness_straggler_timestamp_seconds{role=policy,rank=1}"] == run.now
    assert "harness_verdict{outcome=failed}" not in exported.all()
    verdict = run.directory.parent / "verdict.json"
    verdict.write_text('{"judgement": {"outcome": "fai')
    assert "harness_verdict{outcome=failed}" not in exported.all(), "it is just being written"
    verdict.write_text('{"judgement": {"outcome": "failed"}}')
    seen = exported.all()
    assert (seen["harness_verdict{outcome=failed}"], seen["harness_verdict{outcome=passed}"]) == (1, 0)


def test_after_a_journal_that_could_not_be_read_nothing_is_missing_or_counted_twice(
    run: Told, exported: Exported
) -> None:
    run.say(1, STARTED, begun(), done(1))
    assert exported["harness_steps_total"] == 1
    run.say(1, done(2))
    broken = run.directory / "journal" / "supervisor-000001.jsonl"
    broken.write_text("{}\n")
    with pytest.raises(FormatError, match="supervisor-000001"):
        exported.all()
    broken.unlink()
    assert exported["harness_steps_total"] == 2


def test_labels_are_few_and_every_name_is_a_good_one(run: Told, exported: Exported) -> None:
    run.say(1, STARTED, begun(), *(done(step) for step in range(1, 60)), saved(59))
    assert len(exported.all()) < 150
    for name, family in FAMILIES.items():
        assert name.endswith("_total") == (family.kind == "counter"), name
    text = generate_latest(exported.registry).decode()
    assert 'harness_steps_total{run="a-run"} 59.0' in text


def test_dashboard_and_alerts_ask_for_what_there_is() -> None:
    queries = [*dashboard_queries(), *alert_queries().values()]
    asked = {name for query in queries for name in metrics_in(query)}
    assert asked <= FAMILIES.keys()
    assert not FAMILIES.keys() - asked, "what nobody looks at need not be there"
