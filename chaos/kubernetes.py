"""Kubernetes, as a pod may use it that has been given a service account's token: to look at itself, and to be ended.

The fault is fired in the pod that it is to end, by a process of that pod; whether the pod is gone every pod of the
namespace can ask. configs/kubernetes/overlays/hyperpod/drills/ gives them the right to it, and no other overlay does.
API: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ and
https://kubernetes.io/docs/concepts/scheduling-eviction/api-eviction/. No cluster has been asked yet.
"""

import logging
import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from chaos.scene import Scene
from checkpointing.errors import ConfigError

ACCESS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, its namespace and the certificate that the API server's is signed with."""

_TIMEOUT_SECONDS = 3.0
"""The supervisor waits for an answer as well, and has a run to look after."""

_log = logging.getLogger(__name__)
_RIGHTS = "configs/kubernetes/overlays/hyperpod/drills gives a service account the right to it"


def why_not() -> str | None:
    """The `available` of the faults that ask Kubernetes."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return "needs a Kubernetes cluster; kill_node is what it does to the processes"
    if not (ACCESS / "token").exists():
        return f"this pod has no token for the Kubernetes API: {_RIGHTS}"
    return None


def delete(scene: Scene, grace_seconds: int | None) -> None:
    """Delete the pod that this process is in, after so long a time of grace (None: its own).

    Raises:
        ConfigError: the API server does not let it.
    """
    options = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
    _end(scene, "DELETE", "", {"apiVersion": "v1", "kind": "DeleteOptions", **options})


def evict(scene: Scene) -> None:
    """Have the pod that this process is in evicted, as whoever drains its node does. Raises as `delete` does."""
    pod = {"name": socket.gethostname(), "namespace": _namespace()}
    _end(scene, "POST", "/eviction", {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": pod})


def ended(scene: Scene) -> str | None:
    """What the API server says in place of the pod; None while it is there and nobody has told it to end, and while
    the server does not say."""
    noted = scene.noted()
    if "uid" not in noted:
        return None
    try:
        answer = _ask("GET", noted["path"])
        if answer.status_code == httpx.codes.NOT_FOUND:
            return f"pod {noted['name']} is gone"
        metadata = _checked(answer)["metadata"]
    except (httpx.HTTPError, ConfigError) as error:  # the run goes on; whoever looks again may be told
        _log.warning("the fate of pod %s is not known: %s", noted["name"], error)
        return None
    if metadata["uid"] != noted["uid"]:
        return f"pod {noted['name']} is gone, another one has its name"
    at = metadata.get("deletionTimestamp")
    return f"pod {noted['name']} is to be gone by {at}" if at else None


def _end(scene: Scene, method: str, below: str, body: Mapping[str, Any]) -> None:
    # A pod's host name is its own, unless it uses its node's network: then there is no pod of that name.
    name = socket.gethostname()
    path = f"/api/v1/namespaces/{_namespace()}/pods/{name}"
    uid = _checked(_ask("GET", path))["metadata"]["uid"]
    scene.note({"name": name, "path": path, "uid": uid})
    _checked(_ask(method, f"{path}{below}", body))


def _namespace() -> str:
    return (ACCESS / "namespace").read_text().strip()


def _ask(method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    token = (ACCESS / "token").read_text().strip()  # each time: it is renewed
    trusted = ssl.create_default_context(cafile=ACCESS / "ca.crt")
    return httpx.request(
        method,
        f"https://{address}{path}",
        json=body,
        headers={"Authorization": f"Bearer {token}"},
        verify=trusted,
        timeout=_TIMEOUT_SECONDS,
        trust_env=False,  # no proxy between a pod and its API server
    )


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise ConfigError(
            f"Kubernetes refused {answer.request.method} {answer.request.url.path} with {answer.status_code}: "
            f"{answer.text.strip()[:500]}; {_RIGHTS}"
        )
    said: dict[str, Any] = answer.json()
    return said
