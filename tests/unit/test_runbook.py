"""Whoever is called at night finds a section for what called, and the commands in it exist."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

from checkpointing.errors import CHECK_DAMAGED, VERIFY_CANNOT_TELL, VERIFY_DIFFERENT, HarnessError
from checkpointing.events import Event
from checkpointing.signing import Signing
from harness.cli import app
from harness.config import RunConfig
from harness.metrics import FAMILIES
from tests.prometheus import ALERTS, alert_queries

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SECTIONS = {
    section.partition("\n")[0].strip(): section.partition("\n")[2] for section in re.split(r"(?m)^#{2,3} ", RUNBOOK)[1:]
}
USAGE = 2


def exit_codes(kind: type[HarnessError] = HarnessError) -> set[int]:
    return {kind.exit_code}.union(*map(exit_codes, kind.__subclasses__()))


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_every_alert_has_a_section_and_leads_to_it() -> None:
    assert alert_queries().keys() <= SECTIONS.keys()
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{anchor(rule['alert'])}"
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("critical", "warning")


def test_every_exit_code_has_a_section() -> None:
    codes = exit_codes() | {0, USAGE, VERIFY_DIFFERENT, VERIFY_CANNOT_TELL, CHECK_DAMAGED}
    assert {int(title.partition(":")[0]) for title in SECTIONS if title[0].isdigit()} == codes


@pytest.mark.parametrize("title", [title for title in SECTIONS if title.startswith("Harness") or title[0].isdigit()])
def test_a_section_says_what_it_means_how_to_see_more_what_to_do_and_what_not(title: str) -> None:
    places = [SECTIONS[title].find(f"**{part}**") for part in ("Means", "See", "Do", "Don't")]
    assert -1 not in places and places == sorted(places)


def test_what_it_names_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"`harness ([a-z]+)", RUNBOOK)) | set(re.findall(r"(?m)^    harness ([a-z]+)", RUNBOOK)) <= {
        *commands
    }
    anchors = {anchor(title) for title in SECTIONS}
    assert set(re.findall(r"\]\(#([^)]+)\)", RUNBOOK)) <= anchors
    for path in re.findall(r"`((?:configs|tests)/[^`\s]+)`", RUNBOOK):
        assert (ALERTS.parents[2] / path).exists(), path


def said(pattern: str) -> set[str]:
    """What the runbook has where `pattern` has its group, and there is some."""
    found = set(re.findall(pattern, RUNBOOK))
    assert found
    return found


def test_every_option_is_one_of_its_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = re.findall(r"`harness ([a-z]+)([^`]*)`", RUNBOOK)
    for command, words in lines:
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= known, (command, words)
    assert sum("--" in words for _, words in lines) > 5


def test_every_setting_exists() -> None:
    for section, key in re.findall(r"`(supervision|checkpoints|metrics)\.([a-z_.]+)`", RUNBOOK):
        model: Any = RunConfig.model_fields[section].annotation
        for part in key.split("."):
            assert part in model.model_fields, f"{section}.{key}"
            model = {"signing": Signing}.get(part)


def test_every_event_and_metric_exists() -> None:
    names = " ".join(get_args(kind.model_fields["event"].annotation)[0] for kind in get_args(get_args(Event)[0]))
    for sought in said(r"harness events RUN(?: --json)? \| grep (?:-A21 |-E )?'?([^\s`']+)"):
        for word in sought.split("|"):
            assert re.search(word, names), word
    assert said(r"`([a-z]+\.(?:started|ended|restored|detected|built))`") <= set(names.split())
    assert said(r"`(harness_[a-z_]+)`") <= FAMILIES.keys()


def test_every_panel_exists() -> None:
    dashboard = json.loads((ROOT / "configs" / "grafana" / "dashboard.json").read_text())
    panels = {panel["title"] for panel in dashboard["panels"]}
    assert said(r'"([A-Z][a-z ]+)"') <= panels


@pytest.mark.parametrize("page", ["security.md", "cluster.md", "runbook.md"])
def test_every_test_that_is_named_exists(page: str) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_[A-Za-z0-9_]+)`", (ROOT / "docs" / page).read_text()):
        assert f"def {name}(" in sources, name
