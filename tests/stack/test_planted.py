"""The verdict is held to defects that are planted into real drills; `make drill-planted` plants all of them."""

from pathlib import Path

import pytest
from rich.console import Console

from harness import drill
from harness.engines import EnginePool
from tests.planted.__main__ import says
from tests.planted.defects import DEFECTS
from tests.planted.drills import Planted

from .conftest import REPOSITORY


@pytest.mark.long
def test_a_planted_defect_turns_its_drill_red(
    engines: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one parameter after a resume, and a fault that does nothing."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(drill, "FOLDER", tmp_path / "drills")
    drills = Planted(Console(stderr=True), tmp_path, engines)
    for name in ("one bit", "fault that does nothing"):
        judgement = drills.meet(name)
        assert says(judgement, *DEFECTS[name][1:3]), (name, judgement.reasons)
