"""What a fault of a schedule does to the world, at the moment when it is due."""

import errno
import signal
from typing import TYPE_CHECKING

from .clock import Process
from .disk import RUN, STORE, File, Path
from .faults import Fault

if TYPE_CHECKING:
    from .world import World


def inject(world: "World", fault: Fault, process: Process) -> None:
    world.note("FAULT", str(fault))
    victim = world.living(fault.kind.removeprefix("kill "))
    match fault.kind:
        case "kill" if process.name != "operator":
            world.kill(process)
        case "power":
            _cut_power(world)
        case "rank lost":
            world.rank_lost = True
        case "freeze" | "cut off" if process.name not in ("operator", "supervisor", "nature"):
            _stand_still(world, fault, process)
        case "stop":
            Path(f"{RUN}/stop").touch()
        case "damage":
            _damage(world, fault.amount)
        case _ if victim is not None:
            world.kill(victim)
        case _:
            _trouble(world, fault)


def _stand_still(world: "World", fault: Fault, process: Process) -> None:
    """It hangs. "cut off": so does its whole node, nobody can end what runs there, and later it goes on."""
    if fault.kind == "freeze":
        world.clock.pause(process)
        return
    driver = process.parent if process.name == "replicator" and process.parent else process
    node = [one for one in world.family(driver) if one.code is None]
    for one in node:
        one.out_of_reach = True
        world.clock.pause(one)
    if fault.amount < 0.7:
        world.after(2.0, lambda: setattr(driver, "given_up", True))
    world.after(5 + 100 * fault.amount**2, lambda: _back(world, node))


def _back(world: "World", node: list[Process]) -> None:
    """They go on, still out of reach of every signal: what ends them is the fence."""
    for process in node:
        world.note("BACK", f"{process.name} {process.pid}")
        world.clock.go_on(process)


def _trouble(world: "World", fault: Fault) -> None:
    match fault.kind:
        case "clock":
            world.clock.skew = (fault.amount - 0.5) * 20_000
        case "disk full":
            world.disk.refuses = errno.ENOSPC
            world.after(60 * fault.amount, lambda: setattr(world.disk, "refuses", None))
        case _ if world.buckets:
            _on_the_network(world, fault)


def _on_the_network(world: "World", fault: Fault) -> None:
    bucket = world.rng.choice(sorted(world.buckets.values(), key=lambda one: one.name))
    until = world.clock.now + 180 * fault.amount**2
    match fault.kind:
        case "down":
            bucket.down_until = until
        case "denied":
            bucket.denied_until = until
        case "slow":
            bucket.slow_until = until
        case "errors":
            bucket.errors = 1 + int(20 * fault.amount)
        case "lost" if fault.amount < 0.6:
            bucket.lost_creates = 1
        case "lost":
            bucket.lost = 1 + int(3 * fault.amount)
        case "late":
            bucket.late = [300 * fault.amount] * (1 + int(3 * fault.amount))


def _cut_power(world: "World") -> None:
    """Of everything that is on the disk's side of the network: all processes, and what was not synced."""
    mine = world.clock.current.process
    for process in world.processes:
        process.out_of_reach = False
        if process.name not in ("operator", "nature") and process is not mine:
            process.end(-signal.SIGKILL)
    world.disk.lose_power(world.rng)
    world.model.power_cut()
    if mine.name not in ("operator", "nature"):
        mine.end(-signal.SIGKILL)


def _damage(world: "World", amount: float) -> None:
    """Flip a bit of something, cut it short, or delete it. Never the last copy that is right, and not what fences
    attempts off: without that nothing is promised."""
    there = world.model.there
    fence = f"attempts/{world.model.number:06d}.json"
    keys = [
        (tier, key)
        for tier in world.model.tiers
        for key in sorted(there[tier])
        if key.startswith(("blobs/", "manifests/", "commits/", "attempts/"))
        and (tier, key) != (world.model.tiers[0], fence)
        and any(
            there[other].get(key) == there[tier][key] and (other, key) not in world.model.hurt
            for other in world.model.tiers
            if other != tier
        )
    ]
    if not keys:
        return
    tier, key = keys[int(amount * len(keys))]
    whole = there[tier][key]
    left = world.rng.choice([None, whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])])
    world.note("DAMAGE", f"{tier} {key} {'gone' if left is None else len(left) - len(whole)}")
    world.model.damaged(tier, key, left)
    if tier == "file":
        folder, name = world.disk.folder_of(f"{STORE}/{key}")
        file = folder.names.pop(name)
        folder.durable.pop(name, None)
        if left is not None:
            assert isinstance(file, File)
            file.data, file.durable = bytearray(left), left
            folder.names[name] = folder.durable[name] = file
    elif left is None:
        del world.buckets[world.bucket_of(tier)].objects[f"run/{key}"]
    else:
        world.buckets[world.bucket_of(tier)].objects[f"run/{key}"] = left
