"""Builds everything a maze run starts from, once: training and held-out data, tokenizer and base model."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from checkpointing.canonical import digest
from trainer.maze.spec import MazeSpec


@dataclass(frozen=True)
class TaskPaths:
    train: Path
    held_out: Path
    model: Path
    """Folder of the base model and its tokenizer."""
    warm_up: dict[str, float]
    """Figures of the warm-up: parameters, first_loss, last_loss, seconds."""


class _Stamp(BaseModel):
    """Written last, so that it vouches for finished files only."""

    spec: MazeSpec
    code: str
    files: dict[str, str]
    warm_up: dict[str, float]


def build_task(out: Path, spec: MazeSpec) -> TaskPaths:
    """Build the task in folder `out`; or find it there, from the same spec and code and unchanged since.

    Raises:
        ConfigError: there are not enough different mazes for `spec`.
    """
    stamp = _current_stamp(out, spec) or _build(out, spec)
    return TaskPaths(out / "train.parquet", out / "val.parquet", out / "model", stamp.warm_up)


def _build(out: Path, spec: MazeSpec) -> _Stamp:
    # Imported only here: finding a task already built must not wait for torch.
    from trainer.maze.base_model import make_base_model
    from trainer.maze.data import draw_mazes, write_rows

    train, held_out = draw_mazes(spec)
    out.mkdir(parents=True, exist_ok=True)
    write_rows(train, out / "train.parquet")
    write_rows(held_out, out / "val.parquet")
    warm_up = make_base_model(train, spec, out / "model")
    built = [out / "train.parquet", out / "val.parquet", *(out / "model").iterdir()]
    files = {path.relative_to(out).as_posix(): digest(path.read_bytes()) for path in sorted(built)}
    stamp = _Stamp(spec=spec, code=_code_digest(), files=files, warm_up=warm_up)
    unfinished = out / "task.json.tmp"
    unfinished.write_text(stamp.model_dump_json(indent=2))
    unfinished.replace(out / "task.json")
    return stamp


def _current_stamp(out: Path, spec: MazeSpec) -> _Stamp | None:
    try:
        stamp = _Stamp.model_validate_json((out / "task.json").read_bytes())
        unchanged = all(digest((out / name).read_bytes()) == expected for name, expected in stamp.files.items())
    except (FileNotFoundError, ValidationError):
        return None
    return stamp if unchanged and stamp.spec == spec and stamp.code == _code_digest() else None


def _code_digest() -> str:
    """Digest of this package: a task that other code built may be another task."""
    return digest(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
