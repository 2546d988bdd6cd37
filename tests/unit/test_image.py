"""Facts of the Dockerfile that the manifests, KubeRay and run.json rely on. No engine here builds it."""

import re
from pathlib import Path

import pytest

from .kubernetes_samples import built
from .test_packaging import PROJECT, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def lines(instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in DOCKERFILE.splitlines() if line.startswith(f"{instruction} ")]


def test_the_base_is_pinned() -> None:
    [base] = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.12\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    assert [line.split()[0] for line in lines("FROM")] == ["${BASE}", "${BASE}"]


def test_it_is_installed_as_make_does_and_nothing_of_that_stays() -> None:
    [install] = [line for line in lines("RUN") if "scripts/install.sh" in line]
    assert "scripts/install.sh" in (ROOT / "Makefile").read_text()
    assert "UV_NO_CACHE=1" in install and "PIP_NO_CACHE_DIR=1" in install
    assert "pip uninstall" in install and install.index("uninstall") > install.index("install.sh")
    assert "UV_COMPILE_BYTECODE=1" in install  # the manifests' file system is read-only
    for packages in (line for line in lines("RUN") if "apt-get install" in line):
        assert "--no-install-recommends" in packages and "rm -rf /var/lib/apt/lists/*" in packages
    # Triton's compiler, in the image for GPUs alone.
    assert re.findall(r"\bgcc\b.*", lines("RUN")[-1]) and 'test "$PROFILE" = gpu && echo gcc' in lines("RUN")[-1]


@pytest.mark.parametrize("target", ["hyperpod/job", "local/job"])
def test_it_runs_as_who_the_manifests_say(target: str) -> None:
    pod = built(target).cluster()["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert lines("USER") == [f"{pod['runAsUser']}:{pod['runAsGroup']}"]  # a name could be root's, to Kubernetes
    assert f"useradd --create-home --uid {pod['runAsUser']} --gid {pod['runAsGroup']}" in DOCKERFILE


def test_labels_say_what_is_in_it() -> None:
    labels = " ".join(lines("LABEL"))
    for label, argument in {
        "org.opencontainers.image.version": "VERSION",
        "org.opencontainers.image.revision": "COMMIT",
        "harness.lock.sha256": "LOCK_SHA256",
        "harness.profile": "PROFILE",
    }.items():
        assert f'{label}="${{{argument}}}"' in labels
        assert f"--build-arg {argument}=" in (ROOT / "Makefile").read_text()
    assert any("HARNESS_COMMIT=${COMMIT}" in line for line in lines("ENV"))  # for run.json


def test_it_has_what_kuberay_asks_of_an_image() -> None:
    """Dashboard and agent, by which it submits jobs and sees whether a pod is well; openssl, for TLS."""
    assert "ray[default]" in PROJECT["dependencies"]
    assert re.search(r"apt-get install .*\bopenssl\b", lines("RUN")[-1])
    assert any(line.startswith("PATH=/app/.venv/bin:") for line in lines("ENV"))


def test_its_tests_find_it_in_the_image() -> None:
    assert {"!Dockerfile", "!Makefile", "!configs", "!tests"} <= set(Path(ROOT / ".dockerignore").read_text().split())
