"""Whoever is called at night finds a section for what called, and the commands in it exist."""

import re
from pathlib import Path

import pytest
import typer
import yaml

from checkpointing.errors import CHECK_DAMAGED, VERIFY_CANNOT_TELL, VERIFY_DIFFERENT, HarnessError
from harness.cli import app
from tests.prometheus import ALERTS, alert_queries

RUNBOOK = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
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
