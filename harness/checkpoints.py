"""What `harness checkpoints`, `check`, `repair`, `diff` and `prune` do. RUN: a run directory, or the URL of a store."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from checkpointing.commit import (
    Attempt,
    attempt_key,
    commit_key,
    commit_positions,
    newest_attempt,
    parse_commit_key,
    read_record,
)
from checkpointing.comparison import Difference, Side, compare
from checkpointing.errors import CHECK_DAMAGED, CheckpointError, ConfigError
from checkpointing.events import CheckpointsPruned
from checkpointing.history import Rejected, ranked_commits, valid_commits
from checkpointing.inspection import Checkpoint, Overview, overview
from checkpointing.journal import Journal
from checkpointing.manifest import get_manifest
from checkpointing.replication import repair, undurable
from checkpointing.retention import Best, Keep, Plan, Pruner, measured, plan
from checkpointing.tiers import Tier, Tiers
from checkpointing.verification import Check, check, run_ids
from harness.output import age, say, show_table
from harness.runs import FoundRun, find_run, only_supervisor


def show_checkpoints(run: str, console: Console, as_json: bool) -> None:
    found = find_run(run)
    seen = overview(found.tiers, found.keep, found.journal())
    if as_json:
        console.print_json(seen.model_dump_json())
        return
    names = ("step", "attempt", "tiers", "size", "new", "age", "validity", "needed by / reason")
    show_table(console, names, (_row(one) for one in seen.checkpoints))
    say(console, _lag(seen))
    for tier, reason in seen.refused.items():
        say(console, f"{tier} could not be read: {reason}")


def _row(one: Checkpoint) -> tuple[str, ...]:
    return (
        str(one.step),
        str(one.attempt),
        ", ".join(one.tiers) or "-",
        _size(one.bytes_total),
        _size(one.bytes_new),
        age(one.committed),
        one.validity,
        "; ".join(filter(None, (*one.needed_by, one.reason))),
    )


def _lag(seen: Overview) -> str:
    if seen.newest_local is None:
        return "no checkpoint is whole on the first durable tier"
    durable = "none" if seen.newest_durable is None else f"step {seen.newest_durable}"
    lag = seen.newest_local - (seen.newest_durable or 0)
    behind = f"{seen.behind} checkpoints, {lag} steps" if seen.behind else "none"
    return f"newest local: step {seen.newest_local}; newest durable: {durable}; lag: {behind}"


def check_run(run: str, tier: str | None, read_data: bool, console: Console, as_json: bool) -> int:
    """Returns the exit code: 0, 12, 13 or 22, see `Check.exit_code`."""
    tiers = find_run(run).tiers
    found = check(tiers, _durable(tiers, tier) if tier else None, read_data=read_data)
    if as_json:
        console.print_json(found.model_dump_json())
        return found.exit_code
    for one in found.tiers:
        alone = "nothing" if one.restores is None else f"step {one.restores}"
        state = one.refused or f"{one.whole} of {one.commits} checkpoints whole; restores {alone} by itself"
        say(console, f"{one.tier}: {state}")
    for damage in found.damages:
        needed = f"; needed by {_steps(damage.needed_by)}" if damage.needed_by else ""
        elsewhere = f"whole on {', '.join(damage.elsewhere)}" if damage.elsewhere else "whole on no other tier"
        say(console, f"  {damage.tier}: {damage.key}: {damage.what}{needed}; {elsewhere}")
    if signers := ", ".join(f"{number} by {key}" for key, number in sorted(found.signers.items())):
        say(console, f"signatures: {signers}; {found.unsigned} checkpoints are not signed")
    say(console, _conclusion(found, run))
    return found.exit_code


def _conclusion(found: Check, run: str) -> str:
    looked = "every byte was read" if found.read_data else "presence and sizes; --read-data reads every byte"
    if found.newest is None:
        return "no checkpoint: the run would start from the beginning"
    safe = "nothing can be restored" if found.restores is None else f"can resume from step {found.restores}"
    if found.reason:
        return f"the newest checkpoint, step {found.newest}, can't be restored: {found.reason}\n{safe}"
    mended = sum(bool(damage.elsewhere) for damage in found.damages)
    cure = f"; `harness repair {run}` puts back {mended} of {len(found.damages)}" if found.damages else ""
    return f"{safe} ({looked}){cure}"


def repair_run(run: str, tier: str | None, read_data: bool, console: Console) -> int:
    """Returns the exit code: 0, 22 if something is lost, 12 if the newest checkpoint is."""
    found = find_run(run)
    directory = _directory(found, run)
    run_ids(found.tiers)
    failed: dict[str, str] = {}
    with only_supervisor(directory):
        for one in [_durable(found.tiers, tier)] if tier else found.tiers.durable:
            done = repair(found.tiers, one, read_data=read_data)
            say(console, f"{one.name}: {len(done.written)} put back, {decimal(done.bytes_written)}")
            for key in done.written:
                say(console, f"  {key}")
            failed |= done.failed
    for key, reason in failed.items():
        say(console, f"  lost: {key}: {reason}")
    history = (one for one in ranked_commits(found.tiers) if not (isinstance(one, Rejected) and one.abandoned))
    newest = next(history, None)
    lost = newest and (newest.reason if isinstance(newest, Rejected) else failed.get(newest.key))
    if newest and lost:
        say(console, f"the newest checkpoint, step {newest.step}, can't be restored: {lost}")
        return CheckpointError.exit_code
    return CHECK_DAMAGED if failed else 0


def diff_steps(run: str, steps: tuple[int, int], other: str | None, console: Console, as_json: bool) -> None:
    """`other`: the run that the second step is of, if it is another one."""
    tiers = find_run(run).tiers
    others = find_run(other).tiers if other else tiers
    found = compare(_side(tiers, steps[0], run), _side(others, steps[1], other or run))
    if as_json:
        console.print_json(found.model_dump_json())
        return
    _show_difference(found, console)


def _side(tiers: Tiers, step: int, run: str) -> Side:
    commits = {found.step: found for found in valid_commits(tiers)}
    if step not in commits:
        there = ", ".join(map(str, sorted(commits))) or "none"
        raise ConfigError(f"{run}: no checkpoint of step {step} in its history; there are: {there}")
    return Side(tiers, get_manifest(tiers, commits[step].manifest))


def _show_difference(found: Difference, console: Console) -> None:
    for entry in found.entries:
        if entry.ranks[0] != entry.ranks[1]:
            say(console, f"{entry.name}: {entry.ranks[0]} ranks in A, {entry.ranks[1]} in B: not compared")
            continue
        say(console, f"{entry.name}: {len(entry.tensors)} tensors differ, {entry.equal} are equal")
        for path in entry.data:
            say(console, f"  {path}")
    rows = [
        (
            entry.name,
            str(one.rank),
            one.name,
            f"{one.differing} of {one.elements}" if one.differing is not None else "dtype or shape",
            _number(one.max_abs),
            _number(one.relative_l2),
        )
        for entry in found.entries
        for one in entry.tensors
    ]
    if rows:
        show_table(console, ("entry", "rank", "tensor", "differing", "max |B - A|", "|B - A| / |A|"), rows)
    say(console, f"{len(found.entries)} entries differ, {len(found.equal)} are bit-identical")


def policy(newest: int | None, every: int | None, best: str | None, best_count: int) -> Keep | None:
    """What a person asks to be kept; None if nothing was said."""
    if newest is None and every is None and best is None:
        return None
    return Keep(newest=newest or 1, every=every, best=Best(metric=best, count=best_count) if best else None)


def prune_run(run: str, tier: str, keep: Keep | None, dry_run: bool, console: Console) -> None:
    """Delete on `tier` what `keep` lets go of, or the run's own policy for that tier."""
    found = find_run(run)
    directory, tiers, target = _directory(found, run), found.tiers, _durable(found.tiers, tier)
    keep = keep or found.keep.get(target.name)
    if keep is None:
        raise ConfigError(f"{target.name} keeps everything in this run; say what to keep: --newest, --every or --best")
    metrics = measured([record.event for record in found.journal()], keep.best.metric) if keep.best else {}
    if keep.best and not metrics:
        raise ConfigError(f"--best {keep.best.metric}: the journal of {run} has no such metric")
    attempt = read_record(Attempt, tiers, attempt_key(newest_attempt(tiers)))
    if newest_attempt(target.store) < attempt.attempt:
        raise ConfigError(f"{target.name} has not heard of attempt {attempt.attempt} yet: it can be pruned after that")
    if dry_run:
        _show_plan(plan(target.store, keep, _undurable(tiers, target), metrics), target, "would free", console)
        return
    with only_supervisor(directory):
        pruner, protected = Pruner(target.store, keep, tiers.primary.store), _undurable(tiers, target)
        # Twice, as bytes go a prune later than commits: the grace is for a run at work, and none is.
        first, second = (pruner.prune(attempt, protected, metrics) for _ in range(2))
        done = Plan(first.commits + second.commits, first.orphans + second.orphans)
        with closing(Journal(directory, "prune", attempt.attempt)) as journal:
            keys = [item.key for item in done.commits]
            journal.append(CheckpointsPruned(tier=target.name, commits=keys, bytes_freed=done.bytes_freed))
    _show_plan(done, target, "freed", console)


def _undurable(tiers: Tiers, target: Tier) -> set[str]:
    """What a tier after `target` does not have yet. None of it is let go: how far the run's backlog may grow is no
    matter here."""
    later = tiers.durable[tiers.durable.index(target) + 1 :]
    there = {tier.name: {commit_key(*position) for position in commit_positions(tier.store)} for tier in later}
    commits = valid_commits(tiers)
    return undurable(commits, there, len(commits))


def _show_plan(found: Plan, tier: Tier, verb: str, console: Console) -> None:
    blobs = [blob for orphan in found.orphans for blob in orphan.blobs]
    what = _steps([item.key for item in found.commits]) if found.commits else "no checkpoint"
    say(console, f"{tier.name}: {verb} {decimal(found.bytes_freed)}: {what}, {len(blobs)} blobs")


def _durable(tiers: Tiers, name: str) -> Tier:
    tier = tiers.tier(name)
    if tier not in tiers.durable:
        raise ConfigError(f"tier {name!r} is a node's memory: it holds no commits")
    return tier


def _directory(found: FoundRun, run: str) -> Path:
    if found.directory is None:
        raise ConfigError(f"{run}: name the run directory; it says what tiers there are and who is at work")
    return found.directory


def _steps(keys: Sequence[str]) -> str:
    steps = sorted({parse_commit_key(key)[0] for key in keys})
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _size(size: int | None) -> str:
    return "?" if size is None else decimal(size)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
