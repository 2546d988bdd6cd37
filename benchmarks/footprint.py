"""What a save takes up: memory while it runs, bytes on disk afterwards."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.processes import Keeper, Process, Rank, lora_adapter
from benchmarks.profile import Profile
from benchmarks.report import Figure
from trainer.rank_state import capture_optimizer, capture_parameters

_SAMPLE_EVERY = 0.01
"""Seconds."""


def memory(profile: Profile) -> Iterator[Figure]:
    with profile.ranks() as ranks, profile.folder("memory") as folder, Process(Keeper, str(folder)) as keeper:
        keeper.call(_started)
        held = _Memory([*ranks.pids, keeper.pid], ranks.call(_buffer_path))
        steps = iter(range(1, 1000))
        captured = [float(sum(ranks.call(_tensor_bytes)))]

        def save() -> None:
            keeper.call(Keeper.save, ranks.stage(next(steps)))

        before = held.now()
        cold = held.peak(save) - before
        between = held.now()
        warm = [held.peak(save) for _ in range(3)]
    yield Figure("memory", "peak extra memory of the first save / bytes captured", 1.15, [cold], captured, "B")
    yield Figure(
        "memory", "peak of later saves, over the time before the first / bytes captured", 1.15,
        [peak - before for peak in warm], captured * len(warm), "B",
    )  # fmt: skip
    yield Figure(
        "memory", "of that, more than between two saves / bytes captured", None,
        [peak - between for peak in warm], captured * len(warm), "B",
    )  # fmt: skip


def _started(keeper: Keeper) -> None:
    """It has been imported and made when this answers."""


def _buffer_path(rank: Rank) -> str:
    return rank.buffer.path


class _Memory:
    """What processes hold together, in bytes, every page counted once. `buffers`: their staging buffers' paths."""

    def __init__(self, pids: Sequence[int], buffers: Sequence[str]) -> None:
        self._pids, self._buffers = pids, buffers

    def now(self) -> float:
        """Buffers by what is allocated of them: while another process maps them, shares of their pages move about."""
        pages = sum(_own_bytes(pid) for pid in self._pids)
        return float(pages + sum(Path(buffer).stat().st_blocks * 512 for buffer in self._buffers))

    def peak(self, action: Callable[[], None]) -> float:
        seen, done = [self.now()], threading.Event()

        def watch() -> None:
            while not done.wait(_SAMPLE_EVERY):
                seen.append(self.now())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            action()
        finally:
            done.set()
            watcher.join()
        return max(*seen, self.now())


def _own_bytes(pid: int) -> int:
    """A process's part of its memory other than staging buffers."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_File"))


def lora(profile: Profile) -> Iterator[Figure]:
    layers = 7 if profile.state_bytes >= 1 << 27 else 1
    adapter = lora_adapter(layers)
    with profile.ranks(adapter) as ranks, profile.folder("lora") as folder, Process(Keeper, str(folder)) as keeper:
        written = []
        held = float(sum(ranks.call(_tensor_bytes)))
        for step in range(1, 4):
            before = _files(folder)
            keeper.call(Keeper.save, ranks.stage(step))
            written.append(float(sum(size for path, size in _files(folder).items() if path not in before)))
    name = f"bytes written for a LoRA step / adapter and optimizer bytes, {layers} layers of an 8B model, rank 16"
    yield Figure("lora", name, 1.02, written, [held] * len(written), "B")


def _tensor_bytes(rank: Rank) -> int:
    parts = capture_parameters(rank.worker), capture_optimizer(rank.worker)
    return sum(tensor.nbytes for part in parts for tensor in part.tensors.values())


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
