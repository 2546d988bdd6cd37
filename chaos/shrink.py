"""The shortest list of faults that still fails: delta debugging (Zeller and Hildebrandt, 2002)."""

from collections.abc import Callable, Sequence


def shortest[T](faults: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A part of `faults`, in their order, that fails and of which no fault can be left out.

    `faults` as a whole are known to fail. `fails` is asked at most once for the same part: it runs training.
    """
    asked: dict[tuple[int, ...], bool] = {}

    def still_fails(part: tuple[int, ...]) -> bool:
        if part not in asked:
            asked[part] = fails(tuple(faults[index] for index in part))
        return asked[part]

    left, pieces = tuple(range(len(faults))), 2
    while len(left) >= 2:
        parts = [left[len(left) * n // pieces : len(left) * (n + 1) // pieces] for n in range(pieces)]
        rests = [tuple(index for index in left if index not in part) for part in parts]
        if found := next((part for part in parts if still_fails(part)), None):
            left, pieces = found, 2
        elif found := next((rest for rest in rests if pieces > 2 and still_fails(rest)), None):
            left, pieces = found, max(pieces - 1, 2)
        elif pieces < len(left):
            pieces = min(2 * pieces, len(left))
        else:
            break
    return tuple(faults[index] for index in left)
