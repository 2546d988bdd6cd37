"""What configs/kubernetes/ would put on a cluster: valid, closed, and of the shape that the run needs."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from jsonschema.protocols import Validator

from checkpointing.canonical import canonical_json
from harness.config import RunConfig, flatten, load_config
from harness.raylets import Profile

from . import kubernetes_policies as policies
from .kubernetes_policies import POLICIES, Built, Manifest, iam_policy
from .kubernetes_samples import DRILLS, KUBERNETES, OVERLAYS, ROOT, TARGETS, build, built, copy, ray_schemas, sources

SERVERS = ("1.30", "1.34")
"""The oldest Kubernetes that knows all that is used (preStop.sleep), and a new one."""


def test_the_copy_is_of_these_sources() -> None:
    assert copy()["sources"] == sources(), "run `python -m tests.unit.kubernetes_samples` where kubectl is, and commit"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here to build the manifests with")
@pytest.mark.parametrize("target", [*TARGETS, DRILLS])
def test_the_copy_is_what_kubectl_builds(target: str) -> None:
    assert build(target) == built(target).manifests


@cache
def ray_validator(kind: str) -> Validator:
    return jsonschema.Draft202012Validator(ray_schemas()[kind])


@cache
def validate(manifest: bytes) -> None:
    """Raises jsonschema.ValidationError; unknown fields are errors."""
    plain = json.loads(manifest)
    if plain["kind"] in ray_schemas():
        ray_validator(plain["kind"]).validate(plain)
    else:
        for server in SERVERS:
            kubernetes_validate.validate(plain, server, strict=True)


@pytest.mark.parametrize("target", [*TARGETS, DRILLS])
def test_every_manifest_is_valid(target: str) -> None:
    for manifest in built(target).manifests:
        validate(canonical_json(manifest))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_holds(target: str, policy: Callable[[Built], Iterator[str]]) -> None:
    assert list(policy(built(target))) == []


def test_pods_that_drills_may_end_differ_in_nothing_else() -> None:
    """A token, and the right to end pods of their namespace."""
    drills, cluster = built(DRILLS), built("hyperpod/cluster")
    assert all(list(policy(drills)) == [] for policy in POLICIES if policy is not policies.no_api_token)
    (role,), (binding,) = drills.of("Role"), drills.of("RoleBinding")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "delete"]},
        {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    ]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "harness", "namespace": "harness"}]
    spec = drills.cluster()
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        assert group["template"]["spec"]["automountServiceAccountToken"] is True
        group["template"]["spec"]["automountServiceAccountToken"] = False
    assert [one for one in drills.manifests if one not in (role, binding)] == cluster.manifests


HEAD = "spec/rayClusterSpec/headGroupSpec/template/spec"
WORKER = "spec/rayClusterSpec/workerGroupSpecs/0/template/spec"
SUBMITTER = "spec/submitterPodTemplate/spec"
CONTEXT = "containers/0/securityContext"
REDIS = "spec/template/spec/containers/0"
GCS = "spec/rayClusterSpec/gcsFaultToleranceOptions"
DELETE = object()


def plant(built: Built, kind: str, name: str, path: str, value: Any) -> None:
    """Set `path` in a manifest, or delete it."""
    node: Any = next(one for one in built.of(kind) if name in ("", one["metadata"]["name"]))
    *above, key = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in above:
        node = node[part]
    if value is DELETE:
        del node[key]
    elif isinstance(node, list) and key == len(node):
        node.append(value)
    else:
        node[key] = value


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("RayJob", "", "spec/backofLimit", 3),
        ("RayJob", "", f"{HEAD}/containers/0/resources/limits/memory", [1]),
        ("RayJob", "", f"{WORKER}/{CONTEXT}/readonly", True),
        ("RayJob", "", "spec/rayClusterSpec/authOptions/mode", "password"),
        ("NetworkPolicy", "redis", "spec/policyType", ["Ingress"]),
        ("PodDisruptionBudget", "head", "spec/minAvailable", [1]),
    ],
)
def test_an_invalid_manifest_is_refused(kind: str, name: str, path: str, value: Any) -> None:
    job = built("hyperpod/job")
    plant(job, kind, name, path, value)
    with pytest.raises(jsonschema.ValidationError):
        for manifest in job.manifests:
            validate(canonical_json(manifest))


ANYWHERE = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}
NOTEBOOK = {"podSelector": {"matchLabels": {"app": "notebook"}}}
OTHERS = {"from": [NOTEBOOK], "ports": [{"port": 8265}]}


@pytest.mark.parametrize(
    ("policy", "kind", "name", "path", "value"),
    [
        (policies.not_root, "RayJob", "", f"{HEAD}/securityContext/runAsNonRoot", DELETE),
        (policies.not_root, "RayJob", "", f"{SUBMITTER}/securityContext/runAsUser", 0),
        (policies.not_root, "RayJob", "", f"{WORKER}/{CONTEXT}/runAsUser", 0),
        (policies.no_privilege, "RayJob", "", f"{WORKER}/{CONTEXT}/privileged", True),
        (policies.no_privilege, "Deployment", "", "spec/template/spec/hostNetwork", True),
        (
            policies.no_privilege,
            "RayJob",
            "",
            f"{WORKER}/{CONTEXT}/allowPrivilegeEscalation",
            DELETE,
        ),
        (
            policies.no_privilege,
            "RayJob",
            "",
            f"{HEAD}/{CONTEXT}/capabilities",
            {"add": ["IPC_LOCK"]},
        ),
        (policies.no_privilege, "RayJob", "", f"{HEAD}/securityContext/seccompProfile", DELETE),
        (policies.no_privilege, "RayJob", "", f"{HEAD}/volumes/0/hostPath", {"path": "/"}),
        (policies.read_only, "RayJob", "", f"{HEAD}/{CONTEXT}/readOnlyRootFilesystem", False),
        (policies.read_only, "RayJob", "", f"{HEAD}/containers/0/volumeMounts/1/readOnly", False),
        (policies.bounded, "RayJob", "", f"{WORKER}/containers/0/resources/limits/memory", DELETE),
        (policies.bounded, "RayJob", "", f"{SUBMITTER}/containers/0/resources/requests", DELETE),
        (policies.bounded, "RayJob", "", f"{HEAD}/volumes/2/emptyDir", {}),
        (policies.no_api_token, "RayJob", "", f"{HEAD}/automountServiceAccountToken", DELETE),
        (policies.no_api_token, "RayJob", "", f"{WORKER}/serviceAccountName", "default"),
        (policies.no_secret, "Service", "", "kind", "Secret"),
        (policies.no_secret, "Deployment", "", f"{REDIS}/env/0/value", "hunter2"),
        (
            policies.no_secret,
            "RayJob",
            "",
            f"{GCS}/redisPassword/value",
            "hunter2",
        ),
        (policies.no_secret, "RayJob", "", f"{HEAD}/containers/0/env/1/value", "redis://:hunter2@redis:6379"),
        (policies.pinned_images, "Deployment", "", f"{REDIS}/image", "redis"),
        (
            policies.pinned_images,
            "Deployment",
            "",
            f"{REDIS}/image",
            "registry:5000/redis:latest",
        ),
        (policies.pinned_images, "RayJob", "", f"{WORKER}/containers/0/image", "a.com/fault-tolerant-rl-harness:0.1.0"),
        (policies.pinned_images, "RayJob", "", f"{HEAD}/containers/0/env/0/value", ""),
        (policies.grace, "RayJob", "", f"{HEAD}/terminationGracePeriodSeconds", 30),
        (policies.grace, "RayJob", "", f"{WORKER}/terminationGracePeriodSeconds", DELETE),
        (policies.grace, "RayJob", "", f"{HEAD}/containers/0/lifecycle", DELETE),
        (policies.grace, "RayJob", "", f"{HEAD}/containers/0/lifecycle/preStop/exec/command/2", "/fsx/runs/other"),
        (policies.grace, "RayJob", "", f"{WORKER}/containers/0/lifecycle/preStop/sleep/seconds", 60),
        (policies.recovery, "RayJob", "", "spec/backoffLimit", 0),
        (policies.recovery, "RayJob", "", "spec/clusterSelector", {"ray.io/cluster": "harness"}),
        (policies.recovery, "RayJob", "", "spec/entrypoint", "python train.py"),
        (policies.recovery, "RayJob", "", GCS, DELETE),
        (policies.recovery, "Service", "", "spec/ports/0/port", 6380),
        (policies.doors, "RayJob", "", "spec/rayClusterSpec/authOptions/mode", "disabled"),
        (policies.doors, "RayJob", "", "spec/rayClusterSpec/tlsOptions", DELETE),
        (policies.placed, "RayJob", "", f"{WORKER}/nodeSelector", DELETE),
        (policies.placed, "RayJob", "", f"{HEAD}/priorityClassName", "other"),
        (policies.placed, "RayJob", "", f"{WORKER}/topologySpreadConstraints", DELETE),
        (policies.placed, "RayJob", "", f"{WORKER}/topologySpreadConstraints/0/labelSelector/matchLabels/x", "y"),
        (policies.disrupted_little, "PodDisruptionBudget", "workers", "spec/minAvailable", 1),
        (policies.disrupted_little, "PodDisruptionBudget", "head", "spec/selector/matchLabels/x", "y"),
        (policies.locks_hold, "PersistentVolume", "", "spec/mountOptions", ["noatime"]),
        (policies.locks_hold, "PersistentVolume", "", "spec/csi/driver", "efs.csi.aws.com"),
        (policies.denied_by_default, "NetworkPolicy", "deny-all", "spec/policyTypes", ["Ingress"]),
        (policies.denied_by_default, "NetworkPolicy", "redis", "spec/podSelector", {"matchExpressions": []}),
        (policies.denied_by_default, "NetworkPolicy", "dashboard", "spec/ingress/0/from", DELETE),
        (policies.denied_by_default, "NetworkPolicy", "dashboard", "spec/ingress/0/from/0", {"namespaceSelector": {}}),
        (policies.denied_by_default, "NetworkPolicy", "dashboard", "spec/ingress/0/ports", DELETE),
        (policies.denied_by_default, "NetworkPolicy", "dashboard", "spec/ingress/1", OTHERS),
        (policies.denied_by_default, "NetworkPolicy", "metrics", "spec/ingress/0/from/0/podSelector", DELETE),
        (policies.denied_by_default, "NetworkPolicy", "metrics", "spec/ingress/0/from/0/namespaceSelector", {}),
        (policies.denied_by_default, "NetworkPolicy", "metrics", "spec/ingress/0/ports/0/port", 8265),
        (policies.denied_by_default, "NetworkPolicy", "metrics", "spec/ingress/0/ports/1", {"port": 6379}),
        (policies.denied_by_default, "NetworkPolicy", "dns", "spec/egress/1", ANYWHERE),
        (policies.denied_by_default, "NetworkPolicy", "object-store", "spec/egress/0/to/0/ipBlock/except", DELETE),
        (policies.denied_by_default, "NetworkPolicy", "object-store", "spec/egress/0/ports", DELETE),
        (policies.scraped, "NetworkPolicy", "metrics", "spec/ingress/0/ports/0/port", 9465),
        (policies.scraped, "NetworkPolicy", "metrics", "spec/ingress/0/from/0", NOTEBOOK),
        (policies.scraped, "NetworkPolicy", "metrics", "spec/podSelector/matchLabels/x", "y"),
        (policies.scraped, "RayJob", "", f"{HEAD}/containers/0/env/1/valueFrom/secretKeyRef/optional", DELETE),
    ],
)
def test_a_planted_violation_is_seen(
    policy: Callable[[Built], Iterator[str]], kind: str, name: str, path: str, value: Any
) -> None:
    job = built("hyperpod/job")
    plant(job, kind, name, path, value)
    assert list(policy(job))


def test_every_policy_has_a_planted_violation() -> None:
    mark = next(m for m in test_a_planted_violation_is_seen.pytestmark if m.name == "parametrize")
    assert {row[0] for row in mark.args[1]} == set(POLICIES)


def s3_tier() -> tuple[str, str]:
    """Bucket and prefix of the run config that goes with the role."""
    tiers = load_config(OVERLAYS["hyperpod"], RunConfig).checkpoints.tiers
    url = urlsplit(next(tier for tier in tiers if tier.startswith("s3://")))
    return url.netloc, url.path.strip("/")


def role_policy() -> Manifest:
    policy: Manifest = json.loads((KUBERNETES / "aws" / "iam-policy.json").read_text())
    return policy


def test_the_role_reaches_the_runs_prefix_and_nothing_else() -> None:
    assert list(iam_policy(role_policy(), *s3_tier())) == []


@pytest.mark.parametrize(
    ("statement", "key", "value"),
    [
        (0, "Action", ["s3:*"]),
        (0, "Action", ["s3:GetObject", "s3:PutBucketPolicy"]),
        (0, "Resource", "arn:aws:s3:::your-bucket/*"),
        (0, "Resource", ["arn:aws:s3:::your-bucket/runs/maze-8b/*", "arn:aws:s3:::other/*"]),
        (0, "NotAction", "s3:GetObject"),
        (1, "Condition", {}),
        (1, "Condition", {"StringLike": {"s3:prefix": "*"}}),
        (1, "Resource", "*"),
        (1, "Action", ["s3:ListAllMyBuckets"]),
    ],
)
def test_a_wider_role_is_seen(statement: int, key: str, value: Any) -> None:
    policy = role_policy()
    policy["Statement"][statement][key] = value
    assert list(iam_policy(policy, *s3_tier()))


def test_the_role_is_taken_by_the_runs_service_account_alone() -> None:
    trust = json.loads((KUBERNETES / "aws" / "trust-policy.json").read_text())["Statement"]
    [account] = built("hyperpod/job").of("ServiceAccount")
    who = f"system:serviceaccount:{account['metadata']['namespace']}:{account['metadata']['name']}"
    [conditions] = [one["Condition"]["StringEquals"] for one in trust]
    assert {key.rpartition(":")[2]: value for key, value in conditions.items()} == {
        "aud": "sts.amazonaws.com",
        "sub": who,
    }
    assert re.fullmatch(
        r"arn:aws:iam::\d{12}:role/\S+", account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
    )


def gpus(built: Built) -> tuple[int, int]:
    """Nodes and GPUs of each, logical ones included."""
    [group] = built.cluster()["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return group["replicas"], int(group["rayStartParams"].get("num-gpus", limits.get("nvidia.com/gpu", 0)))


@pytest.mark.parametrize("target", TARGETS)
def test_the_cluster_has_the_gpus_that_the_run_asks_for(target: str) -> None:
    asked = flatten(built(target).config.skyrl)
    place = "trainer.placement.policy_num"
    assert gpus(built(target)) == (asked[f"{place}_nodes"], asked[f"{place}_gpus_per_node"])


@pytest.mark.parametrize("overlay", ["hyperpod", "eks"])
def test_it_is_the_cluster_that_the_drills_play(overlay: str) -> None:
    played = Profile.model_validate(yaml.safe_load((ROOT / "configs" / "clusters" / "mission.yaml").read_text()))
    head = built(f"{overlay}/cluster").cluster()["headGroupSpec"]
    assert gpus(built(f"{overlay}/cluster")) == (played.nodes, played.gpus)
    assert head["rayStartParams"]["num-cpus"] == str(played.head.cpus)
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize("target", TARGETS)
def test_ray_is_the_version_of_the_image(target: str) -> None:
    """KubeRay chooses by it how to ask whether Ray is well: from 2.53 on without wget, which the image lacks."""
    profile = "cpu" if target.startswith("local") else "gpu"
    lock = (ROOT / "requirements" / f"{profile}.lock").read_text()
    assert f"\nray=={built(target).cluster()['rayVersion']} " in lock


@pytest.mark.parametrize("target", TARGETS)
def test_the_run_joins_this_cluster(target: str) -> None:
    config = built(target).config
    mounts = built(target).cluster()["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert config.ray_address == "auto"
    assert str(config.run_dir).startswith(next(m["mountPath"] for m in mounts if m["name"] == "fsx") + "/")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_job_and_cluster_are_of_one_spec(overlay: str) -> None:
    assert built(f"{overlay}/job").cluster() == built(f"{overlay}/cluster").cluster()


def test_the_operator_waits_for_a_head_as_long_as_the_run_for_a_node() -> None:
    values = yaml.safe_load((KUBERNETES / "kuberay-values.yaml").read_text())
    env = {one["name"]: one["value"] for one in values["env"]}
    waits = load_config(OVERLAYS["hyperpod"], RunConfig).supervision.node_wait_seconds
    assert float(env["RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS"]) >= waits
    assert {"name": "RayClusterMTLS", "enabled": True} in values["featureGates"]
