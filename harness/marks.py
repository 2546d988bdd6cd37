"""What tests marked `chaos` ask for, as drills; and the engines that drills of one session share.

For harness/pytest_plugin.py, which loads this when there is such a test.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from chaos import faults
from chaos.drill import Drill
from chaos.judgement import Judgement
from checkpointing.errors import ConfigError
from checkpointing.journal import Record, read_journal
from harness.config import RunConfig, load_config
from harness.drill import FOLDER, Exercise, configured, engine_settings
from harness.engines import EnginePool
from harness.faulted import require_targets
from harness.results import DrillResult, shown

OWN_S3 = "s3://"
"""Among the tiers of a marked test: the server of the fixture `chaos_s3`."""

_TIERS = "checkpoints.tiers"
_SHORTHANDS: dict[str, dict[str, Any]] = {
    "kill_rank": {"fault": "kill", "target": "policy:0"},
    "kill_engine": {"fault": "kill", "target": "engine:0"},
    "kill_driver": {"fault": "kill", "target": "driver"},
}


class _Mark(BaseModel):
    """The keywords of one mark. What is none of these belongs to its fault: a mark without that names no fault."""

    model_config = ConfigDict(extra="allow", frozen=True)

    set: dict[str, Any] = {}
    expect: dict[str, Any] = {}
    disk_bytes: int | None = None
    outcome: Literal["passed", "failed", "inconclusive", "any"] | None = None

    @property
    def fault(self) -> dict[str, Any]:
        extra = self.model_extra or {}
        return extra | _SHORTHANDS.get(extra.get("fault", ""), {}) | {k: v for k, v in extra.items() if k == "target"}


class Told(NamedTuple):
    """What the marks of one test ask for: a drill, and how it must end for the test to go on."""

    drill: Drill
    outcome: str

    @property
    def needs_s3(self) -> bool:
        return OWN_S3 in self.drill.set.get(_TIERS, ())

    def on(self, cluster: str, s3: str | None) -> Drill:
        """The drill on the cluster at an address, with the store at the URL `s3` where it asks for the session's."""
        changes = dict(self.drill.set)
        if s3 is not None:
            changes[_TIERS] = [s3 if url == OWN_S3 else url for url in changes[_TIERS]]
        return self.drill.model_copy(update={"cluster": cluster, "set": changes})

    def complaint(self, result: DrillResult) -> str | None:
        """Why the test fails with this result, or None."""
        found = result.judgement
        if self.outcome in ("any", found.outcome):
            return None
        lines = [
            _VERDICTS[found.outcome] if self.outcome == "passed" else f"{found.outcome}, not {self.outcome} as asked"
        ]
        lines += [f"  {reason}" for reason in found.reasons]
        return "\n".join([*lines, f"see {result.directory}: verdict.json, report.html", f"again: {result.command}"])


_VERDICTS = {
    "failed": "failed: the run did not survive this as expected",
    "inconclusive": "inconclusive: nothing is wrong, but that proves nothing",
}


class FinishedRun(NamedTuple):
    """A run that has met its faults. `directory`: its own; `records`: its journal; `drill`: what verdict.json holds."""

    directory: Path
    records: list[Record]
    drill: DrillResult

    @property
    def judgement(self) -> Judgement:
        return self.drill.judgement


def told_by(item: pytest.Item) -> Told:
    """What the marks of `item` ask for.

    Raises:
        ConfigError: they, the run config, or its changes are wrong, or the run has not what they aim at.
        Unavailable: all is well, but one of the faults can't be done here.
    """
    changes, expect, planned = _settings(item.config), dict[str, Any](), list[dict[str, Any]]()
    disk_bytes, outcome = None, "passed"
    for words in reversed(list(item.iter_markers("chaos"))):  # as they are read: module, class, then from top to bottom
        if words.args:
            raise ConfigError("a mark takes keywords only: chaos(fault=..., target=..., at=...)")
        mark = _validated(_Mark, words.kwargs)
        changes |= mark.set
        expect |= mark.expect
        disk_bytes = mark.disk_bytes or disk_bytes
        outcome = mark.outcome or outcome
        if mark.fault:
            planned.append(mark.fault)
    if not planned:
        raise ConfigError("no mark names a fault: chaos(fault=..., target=..., at=...)")
    drill = _validated(
        Drill,
        {"run": _config(item.config), "set": changes, "expect": expect, "disk_bytes": disk_bytes, "faults": planned},
    )
    told = Told(drill, outcome)
    _require_possible(told)
    return told


def _settings(config: pytest.Config) -> dict[str, Any]:
    """Of `chaos_set` in the ini file and `--chaos-set`, which goes first."""
    pairs = [line.partition("=") for line in (*config.getini("chaos_set"), *config.getoption("chaos_set"))]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"chaos_set: {key!r} is not of the form key=value")
    try:
        return {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
    except yaml.YAMLError as error:
        raise ConfigError(f"chaos_set: {error}") from error


def _config(config: pytest.Config) -> Path:
    """What `--chaos-config` names, from the current directory, or `chaos_config`, from that of the ini file."""
    if given := config.getoption("chaos_config"):
        return Path(given)
    if not (named := config.getini("chaos_config")):
        raise ConfigError("no run config: name one with --chaos-config FILE, or chaos_config in the ini file")
    path: Path = config.rootpath / named
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _validated[M: BaseModel](model: type[M], words: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(words)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first['input']!r})") from error


def _require_possible(told: Told) -> None:
    drill = told.on("local", "s3://not-started-yet" if told.needs_s3 else None)
    config, unavailable = configured(drill, load_config(drill.run, RunConfig)), None
    for one in drill.faults:
        try:
            require_targets(config, (one,))
        except faults.Unavailable as error:
            unavailable = error  # not before every other fault was seen to be right
    if unavailable is not None:
        raise unavailable


class Drills:
    """Runs drills one after the other. Engines are kept for as long as those of the next one are the same."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._engines: EnginePool | None = None

    def run(self, name: Path, drill: Drill) -> FinishedRun:
        """Leave `drill` as a file under `name`, which `harness drill` repeats, and run it.

        Raises:
            Unavailable: one of the faults can't be done here.
            Preempted: the person at the terminal has asked to stop.
            HarnessError: a run could not even begin.
        """
        path = FOLDER / "pytest" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(drill.model_dump(mode="json", exclude_defaults=True), sort_keys=False))
        exercise = Exercise(path, self._console)
        exercise.prepare(self._engines_of(exercise.config))
        result = exercise.meet(exercise.schedule(None))
        shown(result, self._console)
        assert result.directory is not None
        directory = Path(result.directory) / "faulted"
        return FinishedRun(directory, read_journal(directory), result)

    def end(self) -> None:
        """End the engines."""
        if self._engines is not None:
            self._engines.end_all()

    def _engines_of(self, config: RunConfig) -> EnginePool:
        if self._engines is None or engine_settings(self._engines.config) != engine_settings(config):
            self.end()  # two sets at once may not fit
            self._engines = EnginePool(config, FOLDER / "logs")
        return self._engines


def file_of(nodeid: str) -> Path:
    """The name of a test's drill: tests/test_a.py::TestB::test_c[1] -> tests/test_a/TestB/test_c-1-<digest>.yaml."""
    module, *names = nodeid.split("::")
    plain = re.sub(r"[^\w.-]+", "-", names[-1]).strip("-")
    if plain != names[-1]:  # others may look the same now
        plain = f"{plain[:60]}-{hashlib.sha256(names[-1].encode()).hexdigest()[:8]}"
    return Path(module.removesuffix(".py"), *names[:-1], f"{plain}.yaml")
