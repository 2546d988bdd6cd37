"""What an answer is worth: how far it gets from the start towards the goal, and 1.0 for getting there.

The worth of a walk depends on nothing but where it stands and whether it may still go on, and it is 0.0 at the start.
So an answer given turn by turn earns in sum what the same moves earn at once, and loops, detours and repeated progress
earn nothing.
"""

from dataclasses import dataclass, replace

from trainer.maze.maze import MOVES, Cell, Maze

SUCCESS = 1.0
CLOSEST_FAILURE = 0.5
"""No walk that fails is worth more: walking up to the goal must stay far from solving the maze."""

END_OF_ANSWER = "<|im_end|>"
"""What a chat model ends its turn with; SkyRL leaves it in the text it hands to the environment."""


@dataclass(frozen=True)
class Walk:
    """Where an answer has got to. `broken`: a move led into a wall or was no move, so the walk is over."""

    cell: Cell
    broken: bool = False


def parse_moves(answer: str) -> str | None:
    """The moves of an answer such as "RRD" or "R R D"; None if it is empty or holds anything else but white space."""
    moves = "".join(answer.strip().removesuffix(END_OF_ANSWER).split())
    return moves if moves and set(moves) <= MOVES.keys() else None


def follow(maze: Maze, walk: Walk, moves: str) -> Walk:
    """`walk` continued by `moves` up to the first one that is not possible, which breaks it off where it stands."""
    for move in moves:
        there = maze.after(walk.cell, move)
        if walk.broken or there is None:
            return replace(walk, broken=True)
        walk = Walk(there)
    return walk


def succeeded(maze: Maze, walk: Walk) -> bool:
    """The walk ends on the goal. Passing it is not enough: then long answers would solve mazes by luck."""
    return walk.cell == maze.goal and not walk.broken


def progress(maze: Maze, walk: Walk) -> float:
    """Share of the way that lies behind, in [0, 1]; 0.0 also for standing farther away than the start."""
    return max(0.0, 1 - maze.distances[walk.cell] / maze.distances[maze.start])


def worth(maze: Maze, walk: Walk) -> float:
    """In [0, 1]. The reward of a turn is the worth of the walk after it minus the worth before it."""
    return SUCCESS if succeeded(maze, walk) else CLOSEST_FAILURE * progress(maze, walk)
