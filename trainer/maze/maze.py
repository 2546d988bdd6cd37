"""A maze, and nothing about how it looks or what an answer to it is worth."""

import random
from collections import deque
from collections.abc import Set
from functools import cached_property

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import ConfigError

Cell = tuple[int, int]
"""(row, column), counted from the top left."""

MOVES: dict[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""Move to (row, column) offset."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Maze:
    """`size` x `size` cells, of which `walls` can't be entered: find the way from `start` to `goal`.

    Raises:
        ConfigError: a cell outside the square, start or goal in a wall, or no way between them.
    """

    size: int
    walls: frozenset[Cell]
    start: Cell
    goal: Cell

    def __post_init__(self) -> None:
        outside = [cell for cell in self.walls | {self.start, self.goal} if not _inside(self.size, cell)]
        if outside:
            raise ConfigError(f"maze of size {self.size}: cell {min(outside)} is outside")
        if self.start == self.goal:
            raise ConfigError(f"maze: start and goal are the same cell, {self.start}")
        if self.start in self.walls or self.goal in self.walls:
            raise ConfigError(f"maze: start {self.start} or goal {self.goal} is a wall")
        if self.start not in self.distances:
            raise ConfigError(f"maze: no way from start {self.start} to goal {self.goal}")

    @cached_property
    def distances(self) -> dict[Cell, int]:
        """Moves needed from each cell to the goal; cells without a way to it are left out."""
        return _distances(self.goal, self.open_cells)

    @cached_property
    def open_cells(self) -> frozenset[Cell]:
        return frozenset(_square(self.size)) - self.walls

    def after(self, cell: Cell, move: str) -> Cell | None:
        """The cell that `move`, a key of `MOVES`, leads to from `cell`; None if a wall or the border is in the way."""
        there = _shifted(cell, move)
        return there if there in self.open_cells else None

    def shortest_path(self) -> str:
        """Moves of a shortest way from start to goal, such as "RRDDL". The only one in a generated maze."""
        cell, path = self.start, ""
        while cell != self.goal:
            move = min(MOVES, key=lambda move: self.distances.get(_shifted(cell, move), len(self.open_cells)))
            cell, path = _shifted(cell, move), path + move
        return path

    def to_json(self) -> str:
        """Canonical: equal mazes give equal text."""
        fields = {"size": self.size, "walls": sorted(self.walls), "start": self.start, "goal": self.goal}
        return canonical_json(fields).decode()

    @staticmethod
    def from_json(text: str) -> "Maze":
        """The inverse of `to_json`.

        Raises:
            ConfigError: not JSON, a field missing, unknown or of the wrong type, or not a maze.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise ConfigError(f"not a maze: {where}: {first['msg']}") from error

    def digest(self) -> str:
        """Hex digest of the content: mazes are equal exactly if their digests are."""
        return digest(self.to_json().encode())


_ADAPTER = TypeAdapter(Maze)


def generate(size: int, seed: str) -> Maze:
    """The maze of this size and seed; needs size >= 2. No other source of randomness is read or disturbed.

    Open cells are grown into a tree by only ever opening a cell that touches one open cell, so there is exactly one way
    between any two of them. The goal is a random cell at least half as far from the start as the farthest one.
    """
    rng = random.Random(seed)
    trail = [(rng.randrange(size), rng.randrange(size))]
    opened = set(trail)
    while trail:
        neighbours = [there for move in MOVES if _inside(size, there := _shifted(trail[-1], move))]
        growth = [cell for cell in neighbours if sum(_shifted(cell, move) in opened for move in MOVES) == 1]
        growth = [cell for cell in growth if cell not in opened]
        if growth:
            trail.append(rng.choice(growth))
            opened.add(trail[-1])
        else:
            trail.pop()
    start = rng.choice(sorted(opened))
    far = _distances(start, opened)
    goal = rng.choice([cell for cell in sorted(opened) if 2 * far[cell] >= max(far.values())])
    return Maze(size, frozenset(_square(size)) - opened, start, goal)


def _square(size: int) -> list[Cell]:
    return [(row, column) for row in range(size) for column in range(size)]


def _inside(size: int, cell: Cell) -> bool:
    return 0 <= cell[0] < size and 0 <= cell[1] < size


def _shifted(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def _distances(source: Cell, open_cells: Set[Cell]) -> dict[Cell, int]:
    """Moves from `source` to every cell within reach, breadth first."""
    distances = {source: 0}
    queue = deque([source])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            there = _shifted(cell, move)
            if there in open_cells and there not in distances:
                distances[there] = distances[cell] + 1
                queue.append(there)
    return distances
