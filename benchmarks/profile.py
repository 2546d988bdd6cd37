"""What is measured: how much State in how many ranks, and where its files go."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Ranks, Shapes, full_model


@dataclass(frozen=True)
class Profile:
    """`state_bytes` of parameters and moments in all ranks together; `dtype` as torch names it."""

    state_bytes: int
    dtype: str
    world_size: int
    root: Path
    """An existing folder on the file system to measure."""
    repetitions: int = 5
    """Of what takes seconds; `quick_repetitions` of what takes a fraction of one."""
    quick_repetitions: int = 15

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """An empty folder below `root` that is removed again."""
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self.root) as made:
            yield Path(made).resolve()

    @contextmanager
    def ranks(self, shapes: Shapes | None = None) -> Iterator[Ranks]:
        """Ranks of a full model of this profile, or of `shapes`."""
        shapes = shapes or full_model(self.state_bytes, self.dtype)
        with self.folder("rendezvous") as folder, Ranks(self.world_size, folder / "file", shapes) as ranks:
            yield ranks
