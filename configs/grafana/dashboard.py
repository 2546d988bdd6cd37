"""The dashboard for whoever keeps runs going: `python -m configs.grafana.dashboard > configs/grafana/dashboard.json`.

Queries are written without the run that was chosen; `_of_the_run` puts it in.
"""

import json
import re
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
WIDTH = 24
"""Of Grafana's grid."""


class Shown(NamedTuple):
    """One panel. `queries`: {legend: PromQL}. `unit` is Grafana's name. A number shows its value, or with `says` its
    legend: which state it is."""

    title: str
    queries: dict[str, str]
    unit: str = "none"
    text: str = ""
    says: bool = False


AGE = "from when the state was committed until now: what a loss would cost"

ROWS: dict[str, tuple[list[Shown], list[Shown]]] = {
    "Is it training?": (
        [
            Shown("Run", {"{{state}}": "harness_run_state == 1"}, says=True),
            Shown("Step", {"done": "harness_step", "planned": "harness_steps_planned"}),
            Shown("Since the last step", {"": "time() - harness_step_timestamp_seconds"}, "s"),
            Shown("Phase", {"{{phase}}": "harness_phase == 1"}, says=True),
            Shown("In this phase for", {"": "time() - harness_phase_start_timestamp_seconds"}, "s"),
            Shown("Since the last sign", {"": "time() - harness_last_sign_timestamp_seconds"}, "s"),
        ],
        [
            Shown("Reward", {"reward": "harness_reward"}),
            Shown("Loss", {"loss": "harness_loss"}),
            Shown("Seconds per step", {"seconds": "harness_seconds_per_step"}, "s", "saves and evaluations included"),
            Shown(
                "Steps per hour", {"steps": "3600 * rate(harness_steps_total[1h])"}, text="steps done again included"
            ),
            Shown("Phases", {"{{phase}}": "harness_phase_seconds"}, "s", "how long each took when it was last timed"),
            Shown(
                "Engines and ranks",
                {
                    "engines serving": "sum by (run) (harness_engine_serving)",
                    "ranks": "harness_ranks",
                    "slowest rank / median": "harness_slowest_rank_ratio",
                },
            ),
        ],
    ),
    "Is it safe?": (
        [
            Shown("Local checkpoint", {"": "time() - harness_checkpoint_local_timestamp_seconds"}, "s", AGE),
            Shown("Durable checkpoint", {"": "time() - harness_checkpoint_durable_timestamp_seconds"}, "s", AGE),
            Shown("Steps not durable", {"": "harness_step - harness_checkpoint_durable_step"}),
            Shown("Tiers that refuse", {"": "sum by (run) (harness_tier_failing)"}),
            Shown("Disk", {"free": "harness_disk_free_bytes", "limit": "harness_disk_limit_bytes"}, "bytes"),
            Shown("Left out, rejected", {"": "harness_saves_skipped_total + harness_checkpoints_rejected_total"}),
        ],
        [
            Shown(
                "Checkpoints",
                {
                    "step": "harness_step",
                    "local": "harness_checkpoint_local_step",
                    "durable": "harness_checkpoint_durable_step",
                },
            ),
            Shown(
                "Backlog",
                {"waiting for {{tier}}": "harness_tier_backlog", "{{tier}} refuses": "harness_tier_failing"},
            ),
            Shown(
                "Throughput while writing",
                {
                    "{{tier}}": "increase(harness_tier_written_bytes_total[1h]) "
                    "/ increase(harness_tier_write_seconds_total[1h])"
                },
                "Bps",
            ),
            Shown(
                "Training stopped, a save",
                {"seconds": "increase(harness_save_stopped_seconds_total[1h]) / increase(harness_saves_total[1h])"},
                "s",
            ),
        ],
    ),
    "What happened?": (
        [
            Shown("Attempt", {"": "harness_attempt"}),
            Shown("Attempts without progress", {"": "harness_attempts_without_progress"}, text="it gives up after 5"),
            Shown("Divergences", {"": "harness_divergences_total"}),
            Shown("Last verdict", {"{{outcome}}": "harness_verdict == 1"}, text="of a drill's run", says=True),
            Shown("Exit code", {"": "harness_exit_code"}, text="while it is stopped; docs/runbook.md"),
            Shown("Answers rejected", {"": "harness_generations_rejected_total"}),
        ],
        [
            Shown("Recoveries", {"{{rung}}: {{cause}}": "harness_recoveries_total > 0"}),
            Shown(
                "Refusals and slow ranks",
                {
                    "{{tier}}": "harness_tier_failures_total",
                    "{{role}} {{rank}} slow, hours ago": "(time() - harness_straggler_timestamp_seconds) / 3600",
                },
            ),
        ],
    ),
    "What will it cost?": (
        [
            Shown("Useful time", {"": "harness_useful_ratio"}, "percentunit"),
            Shown("Expected end", {"": "1000 * harness_expected_end_timestamp_seconds"}, "dateTimeFromNow"),
            Shown(
                "Rank hours lost",
                {
                    "": "(harness_down_seconds_total + harness_repeated_seconds_total) "
                    "* on (instance, run) harness_ranks / 3600"
                },
                text="being down and doing again, times the ranks there are now",
            ),
            Shown("Steps repeated", {"": "harness_repeated_steps_total"}),
            Shown(
                "Tokens reused",
                {"": "harness_tokens_reused_total / (harness_tokens_reused_total + harness_tokens_generated_total)"},
                "percentunit",
            ),
            Shown("Checkpoint", {"": "harness_checkpoint_bytes"}, "bytes"),
        ],
        [
            Shown("Tokens generated", {"tokens a second": "rate(harness_tokens_generated_total[1h])"}),
            Shown(
                "Written, less what was deleted",
                {"{{tier}}": "harness_tier_written_bytes_total - harness_tier_freed_bytes_total"},
                "bytes",
            ),
        ],
    ),
}


def _of_the_run(query: str) -> str:
    return re.sub(r"\b(harness_\w+)", r'\1{run=~"$run"}', query)


def _queries(shown: Shown) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(_of_the_run(query)).legend_format(legend).ref_id(chr(ord("A") + number))
        for number, (legend, query) in enumerate(shown.queries.items())
    ]


def _number(shown: Shown, across: int) -> stat.Panel:
    """As it is now: over a range a state that has passed would be shown as well."""
    return (
        stat.Panel()
        .title(shown.title)
        .description(shown.text)
        .datasource(SOURCE)
        .targets([query.instant() for query in _queries(shown)])
        .unit(shown.unit)
        .text_mode(BigValueTextMode.NAME if shown.says else BigValueTextMode.AUTO)
        .color_mode(BigValueColorMode.NONE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .no_value("-")
        .height(4)
        .span(WIDTH // across)
    )


def _curves(shown: Shown, across: int) -> timeseries.Panel:
    return (
        timeseries.Panel()
        .title(shown.title)
        .description(shown.text)
        .datasource(SOURCE)
        .targets([query.range() for query in _queries(shown)])
        .unit(shown.unit)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True))
        .show_points(VisibilityMode.NEVER)
        .height(8)
        .span(WIDTH // across)
    )


def build() -> str:
    """As JSON, the same each time."""
    made = (
        dashboard.Dashboard("Fault-tolerant RL harness")
        .uid("fault-tolerant-rl-harness")
        .tags(["harness"])
        .time("now-6h", "now")
        .refresh("30s")
        .with_variable(dashboard.DatasourceVariable("source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .datasource(SOURCE)
            .query("label_values(harness_run_state, run)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    )
    for title, (numbers, curves) in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for shown in numbers:
            made = made.with_panel(_number(shown, len(numbers)))
        for shown in curves:
            made = made.with_panel(_curves(shown, 2))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True)


if __name__ == "__main__":
    print(build())
