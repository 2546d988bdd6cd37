"""Finding a run from what a person names, its directory or the URL of a store; and the lock of whoever works on it."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from checkpointing.commit import attempt_numbers, commit_positions
from checkpointing.disk import explained
from checkpointing.errors import ConfigError
from checkpointing.journal import Record, read_journal
from checkpointing.retention import Keep
from checkpointing.settings import Checkpoints
from checkpointing.signing import Signing
from checkpointing.stores.posix import PosixStore
from checkpointing.tiers import Tiers
from harness.config import RunConfig

CONFIG_KEY = "config.json"
"""In the run directory: what `harness resume` starts again."""

TIERS_KEY = "tiers.json"
"""In the run directory: {"urls": `checkpoints.tiers`, "keep", "kms_key", "signing"}. As configured and not resolved: so
"file://" stays true when the directory is moved. But of `signing` what a reader needs: every public key, no private
one."""


class FoundRun(NamedTuple):
    """`directory` is None for a run that was named by the URL of one of its tiers; `keep`: {tier: what it keeps}."""

    tiers: Tiers
    directory: Path | None
    keep: Mapping[str, Keep]

    def journal(self) -> list[Record]:
        return read_journal(self.directory) if self.directory else []


class _File(BaseModel):
    urls: tuple[str, ...]
    keep: dict[str, Keep] = {}
    kms_key: str | None = None
    signing: Signing | None = None


def leave_tiers(run_dir: Path, checkpoints: Checkpoints) -> None:
    """Say in the run directory where its checkpoints are, and whose. Raises StoreError."""
    trust = checkpoints.trust()
    signing = Signing(trusted=trust.keys, required=trust.required) if trust.keys else None
    file = _File(urls=checkpoints.tiers, keep=checkpoints.keep, kms_key=checkpoints.kms_key, signing=signing)
    PosixStore(run_dir).put(TIERS_KEY, file.model_dump_json().encode())


class RecordedRun(BaseModel):
    """`directory`: where the paths of `config` that are relative begin."""

    directory: str
    config: RunConfig


def leave_config(run_dir: Path, config: RunConfig) -> None:
    """Say in the run directory with which config it is run. Raises StoreError."""
    record = RecordedRun(directory=str(Path.cwd()), config=config)
    PosixStore(run_dir).put(CONFIG_KEY, record.model_dump_json().encode())


def recorded_run(run_dir: Path) -> RecordedRun:
    """How the run in `run_dir` was last started.

    Raises:
        ConfigError: that is not recorded there.
    """
    path = run_dir / CONFIG_KEY
    if not path.is_file():
        raise ConfigError(f"{run_dir}: no {CONFIG_KEY} there; name a run directory, or use `harness run CONFIG`")
    try:
        found = RecordedRun.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"{path}: {error.errors()[0]['msg']}; start the run with `harness run CONFIG`") from error
    # It may have been moved since.
    return found.model_copy(update={"config": found.config.model_copy(update={"run_dir": run_dir.resolve()})})


def is_recorded(config: RunConfig) -> bool:
    """Whether the run in `config.run_dir` was last started with what `config` says of training."""
    kept = {"run_dir", "ray_address", "supervision", "checkpoints", "metrics"}  # what may change between two starts
    try:
        recorded = recorded_run(config.run_dir).config
    except ConfigError:
        return False
    return recorded.model_dump(exclude=kept) == config.model_dump(exclude=kept)


def find_run(run: str) -> FoundRun:
    """The run in the directory `run`, or the one whose only tier is the store at the URL `run`.

    Raises:
        ConfigError: there is none.
        StoreError: storage refused.
    """
    if "://" in run:
        found = FoundRun(Tiers.open([run]), None, {})
    else:
        directory = Path(run)
        checkpoints = checkpoints_of(directory)
        found = FoundRun(checkpoints.open(directory), directory, checkpoints.keep)
    if not attempt_numbers(found.tiers) and not commit_positions(found.tiers):
        raise ConfigError(f"{run}: no run has been started there; name a run directory or the URL of its store")
    return found


def checkpoints_of(directory: Path) -> Checkpoints:
    """Where the checkpoints of the run in `directory` are, as it says there. Raises like `find_run`."""
    path = directory / TIERS_KEY
    with explained(f"read {path}"):
        if not path.exists():
            if not directory.is_dir():
                raise ConfigError(f"{directory}: no such directory; name a run directory or the URL of its store")
            return Checkpoints()  # a run without a supervisor
        data = path.read_bytes()
    try:
        file = _File.model_validate_json(data)
        return Checkpoints(tiers=file.urls, keep=file.keep, kms_key=file.kms_key, signing=file.signing)
    except ValidationError as error:
        raise ConfigError(f"{path}: {error.errors()[0]['msg']}; write the run's checkpoints.tiers there") from error


@contextmanager
def only_supervisor(directory: Path) -> Iterator[None]:
    """Hold the run directory's lock; the kernel drops it when this process ends, however it ends.

    Raises:
        ConfigError: another `harness run` works on the directory: each would undo what the other does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{directory}: another `harness run` is working on this run; stop it first") from error
        yield
