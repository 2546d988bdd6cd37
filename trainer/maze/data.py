"""Training and held-out mazes, and the parquet rows that SkyRL reads them from."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from checkpointing.errors import ConfigError
from trainer.maze.maze import Maze, generate
from trainer.maze.render import prompt
from trainer.maze.spec import MazeSpec

ENV_CLASS = "maze"
"""The SkyRL-Gym id that a run config must give `trainer.maze.env:MazeEnv`."""

TRIES_PER_MAZE = 50


def draw_mazes(spec: MazeSpec) -> tuple[list[Maze], list[Maze]]:
    """`spec.train` training and `spec.held_out` held-out mazes, all different by content digest.

    The held-out ones are drawn first, so that they stay the same when the number of training mazes changes.

    Raises:
        ConfigError: there are not enough different mazes of this size.
    """
    wanted = spec.held_out + spec.train
    mazes: dict[str, Maze] = {}
    for index in range(TRIES_PER_MAZE * wanted):
        maze = generate(spec.size, f"{spec.seed}/{index}")
        mazes.setdefault(maze.digest(), maze)
        if len(mazes) == wanted:
            drawn = list(mazes.values())
            return drawn[spec.held_out :], drawn[: spec.held_out]
    raise ConfigError(
        f"found {len(mazes)} different mazes of size {spec.size}, need {wanted} for train={spec.train} and "
        f"held_out={spec.held_out}: take a larger size or fewer mazes"
    )


def write_rows(mazes: list[Maze], path: Path) -> None:
    """One row a maze, in the columns of SkyRL's PromptDataset; equal mazes give equal bytes."""
    rows = [
        {
            "data_source": ENV_CLASS,
            "prompt": prompt(maze),
            "env_class": ENV_CLASS,
            "reward_spec": {"method": "rule", "ground_truth": maze.to_json()},
            "extra_info": {"index": index},
        }
        for index, maze in enumerate(mazes)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
