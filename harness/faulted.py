"""A run that meets a fault plan, to its end; and the process that a supervisor is in where the supervisor is a target.

`python -m harness.faulted CONFIG PLAN`, both JSON, is such a process: it may be killed, and started again.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rich.console import Console

from chaos import disks, lasting
from chaos.directory import PlanDirectory, Site
from chaos.plan import FaultPlan, PlannedFault
from chaos.process import ProcessId
from chaos.witness import witness_fired
from checkpointing.errors import ConfigError, HarnessError, Preempted
from checkpointing.events import FaultWitnessed
from checkpointing.journal import Journal, read_journal
from harness.commands import run_to_end
from harness.config import RunConfig, flatten
from harness.engines import EnginePool
from harness.proxies import Proxy, WatchedEngines, behind_proxies, in_front_of_s3

SUPERVISOR = "supervisor"


def write_plan(config: RunConfig, planned: tuple[PlannedFault, ...], folder: Path, cluster: Path | None = None) -> Path:
    """The plan of `planned` for the run of `config`, as JSON in `folder`; returns its path. `cluster`: see `Site`.

    Raises:
        ConfigError: a fault is not possible, or aims at what this run has not.
    """
    urls = require_targets(config, planned)
    places = {target: folder.resolve() / "proxies" / target.replace(":", "-") for target in behind_proxies(planned)}
    proxies = {target: str(place) for target, place in places.items()}
    where = cluster and cluster.resolve()
    site = Site(run_dir=config.run_dir.resolve(), cluster=where, stores=urls, proxies=proxies)
    folder.mkdir(parents=True)
    path = folder / "plan.json"
    path.write_text(FaultPlan(faults=planned, site=site).model_dump_json())
    return path


def require_targets(config: RunConfig, planned: tuple[PlannedFault, ...]) -> dict[str, str]:
    """{"store:file": URL} of the run's tiers. Raises ConfigError like `write_plan`."""
    stores = [f"store:{tier.name}" for tier in config.checkpoints.open(config.run_dir).all]
    urls = dict(zip(stores, config.checkpoints.urls(config.run_dir), strict=True))
    for one in planned:
        one.check()
        _require_target(one.target, config, urls)
    return urls


def meet(config: RunConfig, plan: Path, engines: EnginePool, console: Console) -> None:
    """Run `config` to its end while it meets `plan`. How it ended is in its journal, with every fault that was seen.

    Raises:
        Preempted: the person at the terminal has asked to stop; everything is healed.
        HarnessError: it ended before the journal had a word of it.
    """
    targets = {one.target for one in FaultPlan.load(plan).faults}
    try:
        if SUPERVISOR in targets:
            _meet_in_another_process(config, plan)
        else:
            _meet_here(config, plan, engines, console)
    except Preempted:
        raise
    except HarnessError:
        if not read_journal(config.run_dir):
            raise
    finally:
        _say_what_was_seen(config, plan)


def _meet_here(config: RunConfig, plan: Path, engines: EnginePool, console: Console) -> None:
    directory = PlanDirectory(plan.parent)
    directory.announce(SUPERVISOR, ProcessId.current())
    with ExitStack() as stack:
        site = FaultPlan.load(plan).site
        proxies = {target: stack.enter_context(Proxy(Path(folder))) for target, folder in site.proxies.items()}
        for target, proxy in proxies.items():
            if target.startswith("store:"):
                stack.enter_context(in_front_of_s3(proxy))
        stack.callback(lasting.end_all, plan.parent)
        watched = WatchedEngines(config, engines.logs, engines.engines, directory=directory, proxies=proxies)
        run_to_end(config, console, "faulted", watched, plan)


def _meet_in_another_process(config: RunConfig, plan: Path) -> None:
    """Start a supervisor, and another one when it was killed or told to stop, as often as the plan may do so."""
    command = [sys.executable, "-m", "harness.faulted", config.model_dump_json(), str(plan.resolve())]
    try:
        for _ in range(len(FaultPlan.load(plan).faults) + 1):
            code = subprocess.run(command, stdin=subprocess.DEVNULL, env=os.environ, check=False).returncode
            if code >= 0 and code != Preempted.exit_code:
                break
    finally:
        lasting.end_all(plan.parent)


def _say_what_was_seen(config: RunConfig, plan: Path) -> None:
    """Of faults that last, something may be seen only when the supervisor has written its last word."""
    records = read_journal(config.run_dir)
    said = {record.event.index for record in records if isinstance(record.event, FaultWitnessed)}
    seen = witness_fired(plan.parent, said)
    if records and seen:
        last = max(record.attempt for record in records)
        with closing(Journal(config.run_dir, SUPERVISOR, last)) as journal:
            for event in seen:
                journal.append(event)


@contextmanager
def small_disk(run_dir: Path, size: int | None) -> Iterator[None]:
    """With a `size` in bytes the file tier of `run_dir` lies on a disk of its own, and is gone afterwards."""
    if size is None:
        yield
        return
    folder = run_dir / "store"
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=run_dir.parent, prefix="disk-") as images:
        disks.mount_new(Path(images) / "image", size, folder)
        try:
            yield
        finally:
            disks.unmount(folder)


def _require_target(target: str, config: RunConfig, stores: dict[str, str]) -> None:
    role, _, number = target.partition(":")
    skyrl = flatten(config.skyrl)
    if role == "store" and target not in stores:
        raise ConfigError(f"no tier {target}: this run has {', '.join(stores)}")
    if role in ("policy", "critic", "ref"):
        place = f"trainer.placement.{role}_num"
        count = skyrl.get(f"{place}_nodes", 1) * skyrl.get(f"{place}_gpus_per_node", 1)
    elif role == "engine":
        count = config.engines.count if config.engines else 0
    else:
        return
    if int(number) >= count:
        raise ConfigError(f"no {target}: this run has {count} of them")


def main() -> None:
    config, plan = RunConfig.model_validate_json(sys.argv[1]), Path(sys.argv[2])
    try:
        with EnginePool(config, config.run_dir / "logs") as engines:
            _meet_here(config, plan, engines, Console(quiet=True))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
