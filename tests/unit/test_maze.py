import json
import random

import pytest

from checkpointing.errors import ConfigError
from trainer.maze.maze import MOVES, Cell, Maze, generate
from trainer.maze.render import as_text, observation

MAZES = [generate(size, f"test/{index}") for size in (2, 3, 4, 5, 8) for index in range(40)]


def neighbours(maze: Maze, cell: Cell) -> list[Cell]:
    beside = [(cell[0] + 1, cell[1]), (cell[0] - 1, cell[1]), (cell[0], cell[1] + 1), (cell[0], cell[1] - 1)]
    return [there for there in beside if there in maze.open_cells]


def every_way(maze: Maze, cell: Cell, behind: tuple[Cell, ...] = ()) -> list[int]:
    """Lengths of all ways to the goal that enter no cell twice."""
    if cell == maze.goal:
        return [len(behind)]
    onward = [there for there in neighbours(maze, cell) if there not in behind]
    return [length for there in onward for length in every_way(maze, there, (*behind, cell))]


def reached_by(maze: Maze, moves: str) -> Cell:
    cell = maze.start
    for move in moves:
        there = maze.after(cell, move)
        assert there is not None
        cell = there
    return cell


def test_generated_mazes_are_solved_by_their_shortest_path() -> None:
    for maze in MAZES:
        assert reached_by(maze, maze.shortest_path()) == maze.goal
        assert every_way(maze, maze.start) == [len(maze.shortest_path())]  # the only way there is


def test_shortest_path_where_there_are_several_ways() -> None:
    maze = Maze(3, frozenset({(1, 1)}), (0, 0), (1, 2))
    assert sorted(every_way(maze, maze.start)) == [3, 5]
    assert maze.shortest_path() == "RRD"
    assert maze.distances[(2, 0)] == 3


def test_a_seed_gives_one_maze_whatever_the_global_generator_does() -> None:
    random.seed(1)
    before = random.getstate()
    maze = generate(5, "seed")
    assert random.getstate() == before
    random.seed(2)
    assert generate(5, "seed") == maze
    assert generate(5, "another seed") != maze


def test_the_mazes_of_a_seed_stay_what_they_were() -> None:
    """Changing the generator changes every run's data: on purpose only."""
    assert as_text(generate(5, "0/0")) == ".G...\n.#.##\n.S#..\n#..#.\n##..."
    assert generate(5, "0/0").shortest_path() == "LUUR"


def test_json_round_trip_is_canonical() -> None:
    for maze in MAZES:
        assert Maze.from_json(maze.to_json()) == maze
        walls = json.loads(maze.to_json())["walls"]
        assert walls == sorted(walls)
    one, same = (Maze(3, frozenset(walls), (0, 0), (2, 2)) for walls in ([(0, 1), (1, 1)], [(1, 1), (0, 1)]))
    assert one.to_json() == same.to_json() and one.digest() == same.digest()
    assert len({maze.digest() for maze in MAZES}) == len(set(MAZES))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ('{"size":3,"walls":[],"start":[0,0]}', "goal"),
        ('{"size":3,"walls":[],"start":[0,0],"goal":[2,2],"exit":1}', "exit"),
        ('{"size":"3","walls":[],"start":[0,0],"goal":[2,2]}', "size"),
        ('{"size":3,"walls":[[0,1,2]],"start":[0,0],"goal":[2,2]}', "walls"),
        ('{"size":3,"walls":[],"start":[0,0],"goal":[2,3]}', "outside"),
        ('{"size":3,"walls":[[-1,0]],"start":[0,0],"goal":[2,2]}', "outside"),
        ('{"size":3,"walls":[],"start":[1,1],"goal":[1,1]}', "same cell"),
        ('{"size":3,"walls":[[2,2]],"start":[0,0],"goal":[2,2]}', "is a wall"),
        ('{"size":3,"walls":[[0,1],[1,0]],"start":[0,0],"goal":[2,2]}', "no way"),
    ],
)
def test_what_is_no_maze_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Maze.from_json(text)


def test_the_picture_shows_all_there_is_to_know() -> None:
    for maze in MAZES:
        rows = as_text(maze).split("\n")
        shown = {(r, c): glyph for r, row in enumerate(rows) for c, glyph in enumerate(row)}
        assert len(shown) == maze.size**2
        walls = frozenset(cell for cell, glyph in shown.items() if glyph == "#")
        (start,) = (cell for cell, glyph in shown.items() if glyph == "S")
        (goal,) = (cell for cell, glyph in shown.items() if glyph == "G")
        assert Maze(maze.size, walls, start, goal) == maze


def test_an_observation_names_the_possible_moves() -> None:
    maze = Maze(3, frozenset({(0, 1)}), (0, 0), (2, 2))
    assert observation(maze, (0, 0)) == [{"role": "user", "content": "D"}]
    assert observation(maze, (1, 1)) == [{"role": "user", "content": "DLR"}]
    assert set(MOVES) == set("UDLR")
