"""A node's own memory as a store: a folder in its RAM file system. It outlives processes, and dies with the node.

`memory://NAME`: every process of this node that opens NAME sees the same bytes; other nodes see their own. A test or a
simulated cluster tells its "nodes" apart by the environment variable HARNESS_NODE.
"""

import os
import shutil
import socket
from pathlib import Path

from checkpointing.errors import ConfigError
from checkpointing.store import Promises, Store, is_part
from checkpointing.stores.posix import PosixStore

RAM = Path("/dev/shm")
NODE_VARIABLE = "HARNESS_NODE"


def from_url(url: str) -> Store:
    return MemoryStore(node_folder(url.removeprefix("memory://")))


def node_name() -> str:
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


def node_folder(name: str) -> Path:
    """Where this node keeps what belongs to `name`. Raises ConfigError: not a name."""
    if not is_part(name):
        raise ConfigError(f"store memory://{name}: give a name of letters, digits, '_', '.' and '-'")
    return RAM / f"harness-{os.getuid()}" / name / node_name()


def forget_nodes(prefix: str) -> None:
    """The memory of the simulated nodes of this machine whose names begin so is lost, as it is with a real one."""
    for folder in RAM.glob(f"harness-{os.getuid()}/*/{prefix}*"):
        shutil.rmtree(folder, ignore_errors=True)


class MemoryStore(PosixStore):
    promises = Promises(atomic_put=True, durable_on_return=False, create_once=True)
