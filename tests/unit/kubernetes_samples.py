"""What configs/kubernetes/ builds to, from a copy: kubectl, which builds it, is not on every machine.

`python -m tests.unit.kubernetes_samples` writes the copy anew.
"""

import gzip
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from checkpointing.canonical import canonical_json, digest
from harness.config import RunConfig, load_config

from .kubernetes_policies import Built, Manifest

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "configs" / "kubernetes"
DATA = ROOT / "tests" / "data" / "kubernetes"
_COPY = DATA / "built.json.gz"

OVERLAYS = {
    "hyperpod": ROOT / "configs" / "hyperpod.yaml",
    "eks": ROOT / "configs" / "hyperpod.yaml",
    "local": KUBERNETES / "overlays" / "local" / "run.yaml",
}
"""{overlay: the run config it is applied with}."""

TARGETS = [f"{overlay}/{kind}" for overlay in OVERLAYS for kind in ("cluster", "job")]

DRILLS = "hyperpod/drills"
"""What `hyperpod/cluster` is, for drills that end pods; see configs/kubernetes/."""


def sources() -> str:
    """Digest of everything that the copy is built from."""
    files = sorted(path for path in KUBERNETES.rglob("*.yaml"))
    return digest(canonical_json({str(path.relative_to(KUBERNETES)): path.read_text() for path in files}))


def build(target: str) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@cache
def copy() -> dict[str, Any]:
    """{"sources": their digest, "built": {target: manifests}}."""
    found: dict[str, Any] = json.loads(gzip.decompress(_COPY.read_bytes()))
    return found


def built(target: str) -> Built:
    overlay = target.partition("/")[0]
    manifests = json.loads(json.dumps(copy()["built"][target]))  # whoever asks may change it
    return Built(overlay, manifests, load_config(OVERLAYS[overlay], RunConfig))


@cache
def ray_schemas() -> dict[str, Any]:
    """{kind: schema} of KubeRay's custom resources; a field that they do not name is an error, as it is to kubectl."""
    schemas = json.loads(gzip.decompress((DATA / "kuberay-v1.7.0-crds.json.gz").read_bytes()))
    return {kind: _closed(schema) for kind, schema in schemas.items()}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed["additionalProperties"] = False
    return closed


if __name__ == "__main__":
    content = {"sources": sources(), "built": {target: build(target) for target in (*TARGETS, DRILLS)}}
    _COPY.write_bytes(gzip.compress(canonical_json(content), mtime=0))
