"""How a maze looks to a model that reads text: a row a line, one character a cell."""

from trainer.maze.maze import MOVES, Cell, Maze

Message = dict[str, str]
"""A chat message: {"role": ..., "content": ...}."""


def as_text(maze: Maze) -> str:
    """`size` lines of `size` characters: `#` wall, `.` open, `S` start, `G` goal."""

    def glyph(cell: Cell) -> str:
        if cell in maze.walls:
            return "#"
        return {maze.start: "S", maze.goal: "G"}.get(cell, ".")

    return "\n".join("".join(glyph((row, column)) for column in range(maze.size)) for row in range(maze.size))


def prompt(maze: Maze) -> list[Message]:
    """The conversation that asks for a way through: the picture and not a word, as each token costs time."""
    return [{"role": "user", "content": as_text(maze)}]


def observation(maze: Maze, cell: Cell) -> list[Message]:
    """What a turn that ends on `cell` is answered with: the moves possible from there, such as "DR"."""
    return [{"role": "user", "content": "".join(move for move in MOVES if maze.after(cell, move))}]
