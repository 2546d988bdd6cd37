"""A rank is cut off from the other ranks of its machine: what they send each other by TCP is dropped, nobody is told.

The kernel's packet filter does so, nft(8), which needs root. Gloo's connections are of that kind; NCCL uses none
between ranks of one machine.
"""

import json

import psutil

from chaos.commands import run
from chaos.directory import PlanDirectory
from chaos.faults import Kind
from chaos.process import ProcessId
from chaos.scene import Parameters, Scene
from checkpointing.errors import ConfigError

__all__ = ["KIND", "Parameters", "available", "heal", "inject", "witness"]

KIND: Kind = "process"
_RANKS = ("policy", "critic", "ref")

_FILTER = """
table inet {table} {{
  counter dropped {{ }}
  chain out {{
    type filter hook output priority 0;
    tcp sport . tcp dport {{ {pairs} }} counter name dropped drop;
  }}
}}
"""


def available() -> str | None:
    try:
        run("nft", "list", "tables")
    except ConfigError as error:
        return f"packets can't be filtered here: {error}"
    return None


def inject(scene: Scene) -> None:
    ports = _ports(scene.process)
    announced = PlanDirectory(scene.folder.parent).announced()
    peers = {name: process for name, process in announced.items() if name.partition(":")[0] in _RANKS}
    if peers.pop(scene.fired.target, None) is None:
        raise ConfigError(f"{scene.fired.target} is no rank")
    shared = {pair for peer in peers.values() for pair in _ports(peer) if pair[::-1] in ports}
    if not shared:
        raise ConfigError(f"{scene.fired.target} has no TCP connection to another rank of its machine")
    # Loopback: what either of two ranks sends goes out once.
    pairs = ", ".join(f"{own} . {other}" for own, other in sorted(shared | {pair[::-1] for pair in shared}))
    table = f"chaos_{scene.process.pid}_{scene.fired.index}"
    scene.note({"table": table})
    run("nft", "-f", "-", told=_FILTER.format(table=table, pairs=pairs))


def heal(scene: Scene) -> None:
    table = scene.noted().get("table")
    if table and f"table inet {table}\n" in run("nft", "list", "tables"):
        run("nft", "delete", "table", "inet", table)


def witness(scene: Scene) -> str | None:
    """The filter's own count."""
    if not (table := scene.noted().get("table")):
        return None
    try:
        said = json.loads(run("nft", "--json", "list", "counter", "inet", table, "dropped"))
    except ConfigError:  # healed: there is no such table any more
        return None
    packets = sum(one["counter"]["packets"] for one in said["nftables"] if "counter" in one)
    return f"{packets} packets between {scene.fired.target} and other ranks were dropped" if packets else None


def _ports(process: ProcessId) -> set[tuple[int, int]]:
    """{(own port, port of the other side)} of its connections."""
    try:
        found = psutil.Process(process.pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {(one.laddr.port, one.raddr.port) for one in found if one.status == psutil.CONN_ESTABLISHED}
