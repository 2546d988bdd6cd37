"""`delete_pod` and `drain_node` against a stand-in for Kubernetes' API server: TLS, a token, and one pod, this one."""

import json
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from chaos import faults, kubernetes
from chaos.witness import witness_fired
from checkpointing.errors import ConfigError
from harness.processes import free_port

from .fault_samples import scene

TOKEN = "t0ken-of-the-service-account"
POD = f"/api/v1/namespaces/training/pods/{socket.gethostname()}"
ENDING = "2026-12-01T05:00:00Z"


class Server:
    """What it has heard, and what it says of the pod; `refuses`: what it answers instead to whoever ends it."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, Any]] = []
        self.pod: dict[str, Any] | None = {"metadata": {"name": socket.gethostname(), "uid": "first"}}
        self.refuses: tuple[int, str] | None = None
        self.does_nothing = False

    def answer(self, method: str, path: str, token: str | None, body: Any) -> tuple[int, Any]:
        self.heard.append((method, path, body))
        if token != f"Bearer {TOKEN}":
            return 401, {"message": "Unauthorized"}
        if method == "GET":
            return (404, {"message": "not found"}) if path != POD or self.pod is None else (200, self.pod)
        if self.refuses:
            return self.refuses[0], {"message": self.refuses[1]}
        assert (method, path) in (("DELETE", POD), ("POST", f"{POD}/eviction")) and self.pod is not None
        if not self.does_nothing:
            self.pod["metadata"]["deletionTimestamp"] = ENDING
        return 201, {}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made, access = Server(), tmp_path / "serviceaccount"
    access.mkdir()
    (access / "token").write_text(TOKEN)
    (access / "namespace").write_text("training")
    certificate(access / "ca.crt", tmp_path / "key")
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(made))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(access / "ca.crt", tmp_path / "key")
    http.socket = context.wrap_socket(http.socket, server_side=True)
    monkeypatch.setattr(kubernetes, "ACCESS", access)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(http.server_address[1]))
    thread = Thread(target=http.serve_forever)
    thread.start()
    yield made
    http.shutdown()
    http.server_close()
    thread.join()


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            told = json.loads(body) if body else None
            code, said = server.answer(self.command, self.path, self.headers.get("authorization"), told)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        do_DELETE = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Not to the terminal."""

    return Handler


def certificate(certificate: Path, key: Path) -> None:
    """Of 127.0.0.1, signed by itself."""
    secret, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "api")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key.write_bytes(secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


OPTIONS: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
EVICTION: dict[str, Any] = {
    "apiVersion": "policy/v1",
    "kind": "Eviction",
    "metadata": {"name": socket.gethostname(), "namespace": "training"},
}


@pytest.mark.parametrize(
    ("fault", "parameters", "asked"),
    [
        ("delete_pod", {}, ("DELETE", POD, OPTIONS)),
        ("delete_pod", {"grace_seconds": 0}, ("DELETE", POD, OPTIONS | {"gracePeriodSeconds": 0})),
        ("drain_node", {}, ("POST", f"{POD}/eviction", EVICTION)),
    ],
)
def test_the_pod_is_ended_and_that_is_seen(
    tmp_path: Path, server: Server, fault: str, parameters: dict[str, Any], asked: tuple[str, str, Any]
) -> None:
    found, at = faults.load(fault), scene(tmp_path / "plan", fault, "policy:1", parameters=parameters)
    assert found.witness(at) is None, "nobody has done anything"
    found.inject(at)
    assert [heard for heard in server.heard if heard[0] != "GET"] == [asked]
    assert found.witness(at) == f"pod {socket.gethostname()} is to be gone by {ENDING}"
    server.pod = {"metadata": {"name": socket.gethostname(), "uid": "second"}}
    assert found.witness(at) == f"pod {socket.gethostname()} is gone, another one has its name"
    server.pod = None
    assert found.witness(at) == f"pod {socket.gethostname()} is gone"


def test_the_supervisor_sees_it_where_nobody_lived_to_say_so(tmp_path: Path, server: Server) -> None:
    at = scene(tmp_path, "delete_pod", "driver")
    faults.load("delete_pod").inject(at)
    fired = tmp_path / "fired" / "0.json"
    record = json.loads(fired.read_text())
    fired.write_text(json.dumps(record | {"process": record["injector"]}))  # it was in its own pod
    server.pod = None
    (event,) = witness_fired(tmp_path)
    assert event.evidence == f"pod {socket.gethostname()} is gone"


def test_what_had_no_effect_is_not_witnessed(tmp_path: Path, server: Server) -> None:
    server.does_nothing = True
    at = scene(tmp_path, "delete_pod", "policy:1")
    faults.load("delete_pod").inject(at)
    assert faults.load("delete_pod").witness(at) is None


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [("delete_pod", 403, "may not delete pods"), ("drain_node", 429, "would violate the pod's disruption budget")],
)
def test_a_refusal_is_said_and_is_no_effect(tmp_path: Path, server: Server, fault: str, code: int, says: str) -> None:
    server.refuses = (code, says)
    at = scene(tmp_path, fault, "policy:1")
    with pytest.raises(ConfigError, match=rf"refused .* with {code}: .*{says}") as refusal:
        faults.load(fault).inject(at)
    assert TOKEN not in str(refusal.value)
    assert faults.load(fault).witness(at) is None


@pytest.mark.parametrize("how", ["refuses", "is away", "has no words"])
def test_who_looks_outlives_a_server_that_does_not_say(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It may be the supervisor."""
    at = scene(tmp_path, "delete_pod", "policy:1")
    faults.load("delete_pod").inject(at)
    with monkeypatch.context() as meanwhile:
        if how == "is away":
            meanwhile.setenv("KUBERNETES_SERVICE_PORT", str(free_port()))
        else:
            code, said = (403, {"message": "may not get pods"}) if how == "refuses" else (502, None)
            meanwhile.setattr(server, "answer", lambda *_: (code, said))
        assert faults.load("delete_pod").witness(at) is None
    assert "is to be gone by" in (faults.load("delete_pod").witness(at) or "")


def test_a_pod_that_goes_by_another_name_is_not_looked_for(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its node's network a pod has its node's name."""
    monkeypatch.setattr(socket, "gethostname", lambda: "ip-10-0-0-7")
    with pytest.raises(ConfigError, match=r"refused GET .*/pods/ip-10-0-0-7 with 404"):
        faults.load("delete_pod").inject(scene(tmp_path, "delete_pod", "policy:1"))
    assert [method for method, _, _ in server.heard] == ["GET"]


def test_only_the_cluster_s_own_server_is_believed(tmp_path: Path, server: Server) -> None:
    certificate(kubernetes.ACCESS / "ca.crt", tmp_path / "other")
    with pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
        faults.load("delete_pod").inject(scene(tmp_path, "delete_pod", "policy:1"))
    assert server.heard == []


@pytest.mark.parametrize("fault", ["delete_pod", "drain_node"])
def test_a_pod_without_a_token_is_told_what_gives_it_one(server: Server, fault: str) -> None:
    assert faults.find(fault).available() is None
    (kubernetes.ACCESS / "token").unlink()
    with pytest.raises(faults.Unavailable, match=r"no token for the Kubernetes API: .*overlays/hyperpod/drills"):
        faults.load(fault)
