"""What holds for every pod and every policy that configs/kubernetes/ would put on a cluster.

Each policy reads built manifests and says what breaks it; test_kubernetes.py plants a violation of each.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from checkpointing.redaction import redactor
from harness.config import RunConfig
from harness.exporter import TOKEN

Manifest = dict[str, Any]

PROMETHEUS = {
    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
METRICS = 9464
"""`metrics.port`, as docs/ and configs/prometheus/ have it."""
HEALTH = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY")
_WRITABLE = {"/tmp", "/home/harness", "/dev/shm", "/fsx", "/app/build", "/data"}


class Built(NamedTuple):
    """What one overlay comes to, and the run config that docs/cluster.md gives it."""

    overlay: str
    manifests: list[Manifest]
    config: RunConfig

    @property
    def on_aws(self) -> bool:
        return self.overlay in ("hyperpod", "eks")

    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def cluster(self) -> Manifest:
        """The spec of the RayCluster, which a RayJob holds."""
        jobs = self.of("RayJob")
        spec: Manifest = jobs[0]["spec"]["rayClusterSpec"] if jobs else self.of("RayCluster")[0]["spec"]
        return spec


class Pod(NamedTuple):
    name: str
    labels: dict[str, str]
    spec: Manifest

    def containers(self) -> Iterator[Manifest]:
        yield from self.spec.get("initContainers", ())
        yield from self.spec["containers"]


def pods(built: Built) -> list[Pod]:
    """A pod of each template."""
    cluster = built.cluster()
    templates = {"head": cluster["headGroupSpec"]["template"]}
    templates |= {f"worker {group['groupName']}": group["template"] for group in cluster["workerGroupSpecs"]}
    templates |= {one["metadata"]["name"]: one["spec"]["template"] for one in built.of("Deployment")}
    for job in built.of("RayJob"):
        templates["submitter"] = job["spec"]["submitterPodTemplate"]
    return [Pod(name, template["metadata"]["labels"], template["spec"]) for name, template in templates.items()]


def not_root(built: Built) -> Iterator[str]:
    for pod in pods(built):
        contexts = [pod.spec.get("securityContext", {}), *(one.get("securityContext", {}) for one in pod.containers())]
        if contexts[0].get("runAsNonRoot") is not True or not contexts[0].get("runAsUser"):
            yield f"{pod.name}: may run as root"
        for context in contexts[1:]:
            if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
                yield f"{pod.name}: a container runs as root"


def no_privilege(built: Built) -> Iterator[str]:
    for pod in pods(built):
        yield from (f"{pod.name}: {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.spec.get(key))
        for volume in pod.spec.get("volumes", ()):
            if "hostPath" in volume:
                yield f"{pod.name}: mounts a path of its node"
        for container in pod.containers():
            context = container.get("securityContext", {})
            if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
                yield f"{pod.name}: {container['name']} may gain privileges"
            if context.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{pod.name}: {container['name']} keeps capabilities"
            if context.get("seccompProfile", {"type": "RuntimeDefault"}) != {"type": "RuntimeDefault"}:
                yield f"{pod.name}: {container['name']} is not under seccomp"
        if pod.spec.get("securityContext", {}).get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name}: is not under seccomp"


def read_only(built: Built) -> Iterator[str]:
    for pod in pods(built):
        for container in pod.containers():
            if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
                yield f"{pod.name}: {container['name']} can write to its own file system"
            for mount in container.get("volumeMounts", ()):
                if not mount.get("readOnly") and mount["mountPath"] not in _WRITABLE:
                    yield f"{pod.name}: {container['name']} can write to {mount['mountPath']}"


def bounded(built: Built) -> Iterator[str]:
    for pod in pods(built):
        for container in pod.containers():
            for kind in ("requests", "limits"):
                given = container.get("resources", {}).get(kind, {})
                for what in {"cpu", "memory", "ephemeral-storage"} - given.keys():
                    yield f"{pod.name}: {container['name']} has no {kind} of {what}"
        for volume in pod.spec.get("volumes", ()):
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{pod.name}: volume {volume['name']} has no limit"


def no_api_token(built: Built) -> Iterator[str]:
    for pod in pods(built):
        if pod.spec.get("automountServiceAccountToken") is not False or pod.spec.get("serviceAccountName") != "harness":
            yield f"{pod.name}: holds a token for the API server, or has another identity"


def no_secret(built: Built) -> Iterator[str]:
    redact = redactor({})
    for manifest in built.manifests:
        if manifest["kind"] == "Secret":
            yield f"secret {manifest['metadata']['name']} is in a manifest"
        for path, value in _leaves(manifest):
            if redact(value) != value:
                yield f"{manifest['kind']}: a secret at {path}"
        for path, node in _nodes(manifest):
            if _SECRET.search(str(node.get("name", ""))) and node.get("value"):
                yield f"{manifest['kind']}: the value of {node['name']} at {path}"
            if "redisPassword" in node and "value" in node["redisPassword"]:
                yield f"{manifest['kind']}: the password of Redis at {path}"


def pinned_images(built: Built) -> Iterator[str]:
    for pod in pods(built):
        for container in pod.containers():
            image = container["image"]
            tag = image.rsplit("/", 1)[-1].partition("@")[0].partition(":")[2]
            if "@sha256:" not in image and tag in ("", "latest"):
                yield f"{pod.name}: {image} is not one certain image"
            if built.on_aws and "harness" in image and "@sha256:" not in image:
                yield f"{pod.name}: {image} is not pinned by digest"
    head = built.cluster()["headGroupSpec"]["template"]["spec"]["containers"][0]
    if {"name": "HARNESS_IMAGE", "value": head["image"]} not in head["env"]:
        yield "head: HARNESS_IMAGE, for run.json, is not its image"


def grace(built: Built) -> Iterator[str]:
    """A pod ends as the run does: the head asks it to stop, and workers hold what is to be saved until it is."""
    seconds = built.config.supervision.grace_seconds
    for pod in pods(built):
        if pod.labels.get("app.kubernetes.io/part-of") != "ray":
            continue
        if pod.spec.get("terminationGracePeriodSeconds") != math.ceil(seconds):
            yield f"{pod.name}: its grace period is not the run's of {seconds:.0f} s"
        hook = pod.spec["containers"][0].get("lifecycle", {}).get("preStop", {})
        if pod.name == "head" and hook.get("exec", {}).get("command") != ["harness", "stop", str(built.config.run_dir)]:
            yield f"head: does not ask the run in {built.config.run_dir} to stop"
        if pod.name != "head" and not seconds / 2 < hook.get("sleep", {}).get("seconds", 0) < seconds:
            yield f"{pod.name}: ends before the run can be saved, or is killed first"


def recovery(built: Built) -> Iterator[str]:
    """What is lost is started again: a GCS by its state, a job on another cluster."""
    ft = built.cluster().get("gcsFaultToleranceOptions", {})
    services = {f"{s['metadata']['name']}:{s['spec']['ports'][0]['port']}" for s in built.of("Service")}
    if ft.get("redisAddress") not in services or "secretKeyRef" not in ft.get("redisPassword", {}).get("valueFrom", {}):
        yield "the GCS keeps nothing"
    for job in built.of("RayJob"):
        spec = job["spec"]
        if not spec.get("backoffLimit") or not spec.get("shutdownAfterJobFinishes") or "clusterSelector" in spec:
            yield "the job is not tried again on another cluster"
        if not re.fullmatch(r"harness run /etc/harness/run\.yaml", spec["entrypoint"]):
            yield "the job does not begin with `harness run`"


def doors(built: Built) -> Iterator[str]:
    cluster = built.cluster()
    auth = cluster.get("authOptions", {})
    if auth.get("mode") != "token" or not auth.get("secretName"):
        yield "dashboard and job port ask for no token"
    if built.on_aws and cluster.get("tlsOptions") != {"enabled": True}:
        yield "Ray's processes talk without TLS"


def placed(built: Built) -> Iterator[str]:
    """Spread over nodes, after everything else in a preemption, and only where HyperPod says that a node is well."""
    for pod in pods(built):
        if built.overlay == "hyperpod" and not HEALTH.items() <= pod.spec.get("nodeSelector", {}).items():
            yield f"{pod.name}: goes to nodes that HyperPod found unwell"
        if pod.name != "submitter" and pod.spec.get("priorityClassName") not in _names(built, "PriorityClass"):
            yield f"{pod.name}: no priority"
        if pod.name.startswith("worker"):
            spread = pod.spec.get("topologySpreadConstraints", [{}])[0]
            if (spread.get("topologyKey"), spread.get("maxSkew")) != ("kubernetes.io/hostname", 1) or not _selects(
                spread["labelSelector"], pod.labels
            ):
                yield f"{pod.name}: one node may get several"


def disrupted_little(built: Built) -> Iterator[str]:
    """No drain takes the head, or more than one worker at once. Only minAvailable counts for pods of a RayCluster."""
    replicas = {"head": 1} | {f"worker {g['groupName']}": g["replicas"] for g in built.cluster()["workerGroupSpecs"]}
    wanted = {name: 1 if name == "head" else count - 1 for name, count in replicas.items()}
    for pod in pods(built):
        if pod.name in wanted:
            budgets = [
                b["spec"] for b in built.of("PodDisruptionBudget") if _selects(b["spec"]["selector"], pod.labels)
            ]
            if [budget.get("minAvailable") for budget in budgets] != [wanted[pod.name]]:
                yield f"{pod.name}: its disruption budget is not {wanted[pod.name]}"


def locks_hold(built: Built) -> Iterator[str]:
    """`harness run` holds a lock in the run directory. Lustre keeps it to one node unless mounted with flock."""
    volumes = [v for v in built.of("PersistentVolume") if v["spec"].get("csi", {}).get("driver") == "fsx.csi.aws.com"]
    classes = [c for c in built.of("StorageClass") if c["provisioner"] == "fsx.csi.aws.com"]
    options = [v["spec"].get("mountOptions", []) for v in volumes] + [c.get("mountOptions", []) for c in classes]
    if built.on_aws and not options:
        yield "no file system"
    if any("flock" not in given for given in options):
        yield "locks do not hold between nodes"


def denied_by_default(built: Built) -> Iterator[str]:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in built.of("NetworkPolicy")}
    if {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} not in policies.values():
        yield "not everything is denied that is not allowed"
    for name, policy in policies.items():
        if policy["podSelector"].keys() - {"matchLabels"}:
            yield f"{name}: not understood"
        for rule in policy.get("ingress", ()):
            if not rule.get("from") or any("podSelector" not in peer for peer in rule["from"]):
                yield f"{name}: lets in more than named pods"
        for rule in policy.get("egress", ()):
            if not rule.get("to"):
                yield f"{name}: lets out to everywhere"
            for peer in rule.get("to", ()):
                block = peer.get("ipBlock")
                closed = block and "169.254.0.0/16" in block.get("except", ()) and _ports(rule) == {443}
                if block and not (name == "object-store" and closed):
                    yield f"{name}: lets out to addresses"
    yield from _dashboard_is_closed(built, policies)


def _dashboard_is_closed(built: Built, policies: dict[str, Manifest]) -> Iterator[str]:
    """To the head's ports come the run's own pods; to the dashboard also the submitter and KubeRay's operator; to the
    metrics Prometheus."""
    head = next(pod for pod in pods(built) if pod.name == "head")
    for name, policy in policies.items():
        if not _selects(policy["podSelector"], head.labels):
            continue
        for rule in policy.get("ingress", ()):
            for peer in rule.get("from", ()):
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                own = labels.get("app.kubernetes.io/part-of") == "ray" and "namespaceSelector" not in peer
                asks = labels.get("app.kubernetes.io/component") == "submitter" or labels == {
                    "app.kubernetes.io/name": "kuberay-operator"
                }
                allowed = own or (asks and _ports(rule) == {8265}) or (peer == PROMETHEUS and _ports(rule) == {METRICS})
                if not allowed:
                    yield f"{name}: lets others to the head"


def scraped(built: Built) -> Iterator[str]:
    """Prometheus, in its own namespace, reaches the head's port of metrics, and the run can ask it for a token."""
    head = next(pod for pod in pods(built) if pod.name == "head")
    policies = [policy["spec"] for policy in built.of("NetworkPolicy")]
    rules = [r for p in policies if _selects(p["podSelector"], head.labels) for r in p.get("ingress", ())]
    if not any(PROMETHEUS in rule.get("from", ()) and METRICS in _ports(rule) for rule in rules):
        yield "Prometheus does not reach the metrics"
    [container] = head.spec["containers"]
    given = [one.get("valueFrom", {}).get("secretKeyRef") for one in container["env"] if one["name"] == TOKEN]
    if given != [{"name": "metrics", "key": "token", "optional": True}]:
        yield f"head: {TOKEN} is not what the secret says, or no run begins without one"


def iam_policy(document: Manifest, bucket: str, prefix: str) -> Iterator[str]:
    """What `document` allows beyond objects below `prefix` of `bucket` and their names."""
    objects = {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}
    for statement in document["Statement"]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        names = {"StringLike": {"s3:prefix": f"{prefix}/*"}}
        if statement.keys() - {"Sid", "Effect", "Action", "Resource", "Condition"} or statement["Effect"] != "Allow":
            yield f"{statement}: not understood"
        elif set(actions) <= objects:
            if statement["Resource"] != f"arn:aws:s3:::{bucket}/{prefix}/*":
                yield f"objects outside the prefix: {statement['Resource']}"
        elif actions != ["s3:ListBucket"]:
            yield f"other actions: {actions}"
        elif statement["Resource"] != f"arn:aws:s3:::{bucket}" or statement.get("Condition") != names:
            yield "names outside the prefix"


POLICIES: tuple[Callable[[Built], Iterator[str]], ...] = (
    not_root,
    no_privilege,
    read_only,
    bounded,
    no_api_token,
    no_secret,
    pinned_images,
    grace,
    recovery,
    doors,
    placed,
    disrupted_little,
    locks_hold,
    denied_by_default,
    scraped,
)


def _names(built: Built, kind: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in built.of(kind)}


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Only by matchLabels: nothing else is in use."""
    return not selector.keys() - {"matchLabels"} and bool(selector.get("matchLabels", {}).items() <= labels.items())


def _ports(rule: Manifest) -> set[int]:
    return {port["port"] for port in rule.get("ports", ())}


def _nodes(value: Any, path: str = "") -> Iterator[tuple[str, Manifest]]:
    if isinstance(value, dict):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from _nodes(below, f"{path}/{key}")


def _leaves(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for path, node in _nodes(manifest):
        for key, value in node.items():
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str):
                    yield f"{path}/{key}", one
