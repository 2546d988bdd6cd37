"""What the report of a drill says: made from the journals and the trace of a run that lost a rank and hung once."""

import re
import tomllib
from pathlib import Path

import pytest

from chaos.report import render, spoken
from chaos.report.charts import chart
from chaos.report.costs import costs, fault_rows, recovery_rows
from chaos.report.digests import digest_table
from chaos.report.timeline import Bar, Timeline, timeline
from chaos.verdict import comparisons
from checkpointing.canonical import canonical_json
from checkpointing.events import AttemptEnded, EngineLost, EngineServing, StepDone
from checkpointing.journal import Journal, Record
from checkpointing.trace import Mark, trace_folder

from .cli_samples import harness
from .report_samples import RANK_DEAD, baseline, drill, killed_and_hung, spoiled

ROOT = Path(__file__).parents[2]


def lane(seen: Timeline, name: str) -> list[Bar]:
    (found,) = [lane.bars for lane in seen.lanes if lane.name == name]
    return found


def sampled() -> Timeline:
    run = killed_and_hung()
    return timeline(run.records, run.trace)


def times(records: list[Record], kind: type) -> list[float]:
    return [record.time for record in records if isinstance(record.event, kind)]


def test_lanes() -> None:
    names = [lane.name for lane in sampled().lanes]
    assert names == ["run", "driver", "driver, saves behind", "engines", "policy 0", "policy 1", "keeper 0"]


def test_engines_have_lanes_of_their_own_where_somebody_names_them() -> None:
    run = killed_and_hung()
    late = [mark for mark in run.trace if mark.phase == "generate.begin"][1].time
    announced = [
        Mark(time=run.trace[0].time, process="engine:0", pid=1, phase="worker.started", step=0),
        Mark(time=late, process="engine:1", pid=2, phase="worker.started", step=0),
    ]
    seen = timeline(run.records, [*announced, *run.trace])
    assert [lane.name for lane in seen.lanes][3:5] == ["engine 0", "engine 1"]
    first = len(lane(seen, "engine 0")) - len(lane(seen, "engine 1"))
    assert first == 2, "it was not there yet for the first generation and weight sync"


def test_the_run_lane_tells_kept_from_lost_work() -> None:
    run = killed_and_hung()
    bars = [bar for bar in lane(timeline(run.records, ()), "run") if bar.kind != "commit"]
    assert [bar.kind for bar in bars] == [
        *("start", "step", "step", "lost"),
        *("down", "start", "restore", "step", "lost"),
        *("down", "start", "restore", "step", "step"),
    ]
    deaths = times(run.records, AttemptEnded)
    assert [bar.end for bar in bars if bar.kind == "lost"] == deaths[:2]


def test_a_step_done_again_was_lost_the_first_time() -> None:
    run = killed_and_hung()
    again = [record._replace(attempt=2) for record in run.records if isinstance(record.event, StepDone)][:1]
    kinds = [bar.kind for bar in lane(timeline([*run.records, *again], ()), "run") if bar.title.startswith("step 1,")]
    assert kinds == ["lost", "step"]


def test_a_rank_works_until_the_driver_goes_on_or_the_attempt_ends() -> None:
    run = killed_and_hung()
    seen = timeline(run.records, run.trace)
    trained = next(mark.time for mark in run.trace if mark.phase == "step.trained")
    bars = [bar for bar in lane(seen, "policy 0") if bar.kind == "optimizer"]
    assert bars[0].end == trained
    hung = next(bar for bar in bars if bar.title == "optimizer, step 4")
    assert hung.end == times(run.records, AttemptEnded)[1]
    assert hung.end - hung.begin > 20


def test_what_background_processes_do_in_one_go_is_one_bar() -> None:
    run = killed_and_hung()
    burst = [
        Mark(time=run.trace[-1].time + 0.01 * count, process="replicator:0", pid=3, phase="replicate.blob", step=5)
        for count in range(50)
    ]
    (bar,) = lane(timeline(run.records, [*run.trace, *burst]), "replicator 0")
    assert bar.title == "replicate.blob: 50 times, step 5"


def test_faults_detection_and_recovery_are_marked() -> None:
    run = killed_and_hung()
    seen = timeline(run.records, run.trace)
    assert [sign.kind for sign in seen.signs] == ["fault", "noticed", "back", "fault", "noticed", "noticed", "back"]
    struck = [sign.time for sign in seen.signs if sign.kind == "fault"]
    optimizer = [mark.time for mark in run.trace if mark.phase == "train.optimizer"]
    assert set(struck) <= set(optimizer), "where the target was last seen, not when that was found out"
    assert RANK_DEAD in seen.signs[1].title
    untraced = timeline(run.records, ())
    faults = [sign.time for sign in untraced.signs if sign.kind == "fault"]
    assert faults == times(run.records, AttemptEnded)[:2], "no earlier than anything tells"


def test_an_engine_that_was_lost_alone_is_marked() -> None:
    run = killed_and_hung()
    records = [
        Record(0, run.now, 3, "supervisor", EngineLost(engine=1, reason="engine 1 ended with -9", last_lines=[])),
        Record(0, run.now + 3, 3, "driver", EngineServing(url="an address", seconds=3.0)),
    ]
    titles = [(sign.kind, sign.title) for sign in timeline([*run.records, *records], run.trace).signs][-2:]
    assert titles == [
        ("noticed", "engine 1 is lost: engine 1 ended with -9"),
        ("back", "the engine at an address serves again"),
    ]


@pytest.mark.parametrize("length", [0.4, 7, 61, 600, 86_400, 86_400 * 30])
def test_ticks_are_few_and_inside(length: float) -> None:
    ticks = Timeline(0.0, length, [], [], False).ticks
    assert 1 <= len(ticks) <= 9
    assert all(0 <= tick <= length for tick in ticks)


def test_a_run_that_left_nothing_is_drawn() -> None:
    assert timeline([], ()).lanes[0].bars == []
    assert "Nothing was compared" in render(drill([], baseline=[], trace=()))


def test_curves_of_both_runs() -> None:
    run, base = killed_and_hung().records, baseline().records
    drawn = chart("Loss", "loss", ("no such", "final_loss"), base, run)
    assert [line.run for line in drawn.lines] == ["baseline", "with faults"]
    assert drawn.lines[0].path == drawn.lines[1].path
    assert [dot.title for dot in drawn.lines[1].dots][2] == "with faults, step 3: 0.166667"
    assert [tick.label for tick in drawn.xs] == ["1", "2", "3", "4", "5"]
    assert [tick.label for tick in drawn.resumes] == ["resumed from step 2", "resumed from step 3"]
    assert chart("Loss", "loss", ("no such",), base, run).lines == []


def test_what_is_not_finite_leaves_a_gap_and_is_counted() -> None:
    def broken(record: Record) -> Record:
        if isinstance(record.event, StepDone) and record.event.step == 3:
            return record._replace(event=record.event.model_copy(update={"scalars": {"final_loss": "nan"}}))
        return record

    drawn = chart("Loss", "loss", ("final_loss",), [], [broken(record) for record in baseline().records])
    assert (drawn.not_finite, drawn.lines[0].path.count("M"), len(drawn.lines[0].dots)) == (1, 2, 4)


def test_faults_and_recoveries() -> None:
    run = killed_and_hung()
    faults = fault_rows(run.records, run.trace)
    assert [(row.fault.target, row.attempt) for row in faults] == [("policy:1", 1), ("policy:0", 2)]
    assert [row.after for row in fault_rows(run.records, ())] == [None, None]
    first, second = recovery_rows(run.records, run.trace)
    assert (first.how, first.reason) == ("ended with exit code 17", RANK_DEAD)
    assert second.how == "killed by SIGKILL"
    assert [part.name for part in second.parts] == ["detect", "stop", "start", "rebuild", "restore", "first step"]
    assert second.outage == pytest.approx(second.seconds) == pytest.approx(second.scale)


def test_an_outage_goes_on_over_the_next_death() -> None:
    run = killed_and_hung()
    undone = [record for record in run.records if record.attempt != 2 or not isinstance(record.event, StepDone)]
    first, _ = recovery_rows(undone, run.trace)
    assert first.outage is not None
    assert first.outage > first.seconds + 20
    never = [record for record in undone if record.attempt < 3]
    assert [row.outage for row in recovery_rows(never, run.trace)] == [None, None]


def test_costs_of_both_runs() -> None:
    both = costs(baseline().records, killed_and_hung().records)
    base, run = both["baseline"], both["with faults"]
    assert (base.attempts, base.repeated, base.tokens_generated, base.tokens_reused) == (1, 0, 500, 0)
    assert (run.attempts, run.repeated, run.tokens_generated, run.tokens_reused) == (3, 0, 300, 200)
    assert (run.planned_faults, run.planned_steps, run.commits) == (2, 5, 5)
    again = [record for record in baseline().records if isinstance(record.event, StepDone)][:2]
    repeated = costs([], [*baseline().records, *again])["with faults"]
    assert (repeated.steps, repeated.repeated, repeated.repeated_seconds) == (5, 2, 15)


def test_digests_show_what_differs_first() -> None:
    run = spoiled(killed_and_hung().records, 4, "policy/optimizer")
    table = digest_table(comparisons(baseline().records, run))
    assert [(step.step, step.different) for step in table] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 0)]
    (row,) = [row for row in table[3].rows if row.shown.differs]
    assert (row.shown.entry, row.shown.tensor) == ("policy/optimizer", "lora_a")
    assert {row.shown.restored for row in table[1].rows} == {True, False}


def test_of_a_step_done_twice_the_repetition_that_differs_is_shown() -> None:
    records = killed_and_hung().records
    again = [record._replace(attempt=4) for record in records if isinstance(record.event, StepDone)][:1]
    table = digest_table(comparisons(baseline().records, [*records, *spoiled(again, 1, "policy/rng")]))
    (row,) = [row for row in table[0].rows if row.shown.differs]
    assert (row.shown.entry, row.shown.attempt, row.pairs) == ("policy/rng", 4, 2)


def test_the_page_says_the_verdict_first() -> None:
    passed = render(drill())
    assert passed.index("</span> Passed</h1>") < passed.index("<h2")
    assert "<title>Passed: kill a rank, stop a rank</title>" in passed
    assert "harness drill sample.yaml --seed 42" in passed
    failed = render(drill(spoiled(killed_and_hung().records, 4, "policy/optimizer")))
    assert "</span> Failed</h1>" in failed
    assert failed.count('class="differs is-first"') == 1
    assert "First divergence" in failed
    doubtful = render(drill(outcome="inconclusive", reasons=["the baselines differ"]))
    assert "</span> Inconclusive</h1>" in doubtful
    assert "the baselines differ" in doubtful
    assert "no phase trace" in render(drill(trace=()))
    assert "no phase trace" not in passed


def test_it_asks_for_nothing_and_is_the_same_every_time() -> None:
    page = render(drill())
    assert not re.search(r"//|url\(|@import|\bsrc=|\bhref=|<link|<img|<iframe", page.replace("// Without", ""))
    assert page == render(drill())


def test_what_comes_from_a_run_is_text() -> None:
    nasty = "</title></style></script><script>alert(1)</script><b onclick='x'>\"&"
    records = [
        record._replace(event=record.event.model_copy(update={"reason": nasty}))
        if isinstance(record.event, AttemptEnded)
        else record
        for record in spoiled(killed_and_hung().records, 4, nasty)
    ]
    page = render(drill(records, title=nasty, reasons=[nasty]))
    assert page.count("<script>") == 1
    assert "<b onclick" not in page
    assert page.count("&lt;script&gt;alert(1)") > 5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "-"), (0.04, "0.0 s"), (9.96, "10.0 s"), (10.4, "10 s"), (60, "1 min"), (591, "9 min 51 s")],
)  # fmt: skip
def test_lengths_of_time(seconds: float | None, words: str) -> None:
    assert spoken(seconds) == words


def write_run(directory: Path, records: list[Record]) -> Path:
    for record in records:
        journal = Journal(directory, record.writer, record.attempt)
        journal.append(record.event)
        journal.close()
    return directory


@pytest.mark.usefixtures("unsynced")
def test_harness_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run", killed_and_hung().records)
    base = write_run(tmp_path / "baseline", baseline().records)
    (run / "store").mkdir()
    (run / "store" / "run.json").write_bytes(canonical_json({"seed": 7, "versions": {"torch": "2.13.0"}}))
    trace_folder(run).mkdir()
    marks = [mark.model_dump_json() for mark in killed_and_hung().trace]
    (trace_folder(run) / "driver-1.jsonl").write_text("\n".join(marks) + "\n")

    said = harness("report", run, "--baseline", base)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"identical: {run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    assert f"harness report &#39;{run}&#39; --baseline {base}" in page
    assert "<dt>seed</dt><dd>7</dd>" in page
    assert "policy 1" in page

    said = harness("report", base, "--output", tmp_path / "alone.html")
    assert said.out == f"nothing compared: {tmp_path / 'alone.html'}\n"
    assert "no baseline was named" in (tmp_path / "alone.html").read_text()

    assert harness("report", tmp_path).code == harness("report", run, "--baseline", tmp_path).code == 10
    refused = harness("report", run, "--output", tmp_path / "none" / "x.html")
    assert "cannot write" in refused.err


def test_the_package_holds_the_template() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    used = {path.name for path in (ROOT / "chaos" / "report").iterdir() if path.suffix not in (".py", "")}
    held = {name for glob in settings["package-data"]["chaos.report"] for name in used if Path(name).match(glob)}
    assert held == used == {"template.html", "style.css", "index.html", "script.js"}
