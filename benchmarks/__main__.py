"""What checkpoints and recoveries cost, as ratios within one run: `make bench`, or `python -m benchmarks --help`."""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.footprint import lora, memory
from benchmarks.peers import peers
from benchmarks.profile import Profile
from benchmarks.recovery import recovery
from benchmarks.report import Figure, machine, write
from benchmarks.steps import steps
from benchmarks.stop import stop
from benchmarks.storage import commit, restore
from benchmarks.upload import upload
from benchmarks.watching import watching

ROWS: dict[str, Callable[[Profile], Iterator[Figure]]] = {
    "stop": stop,
    "peers": peers,
    "commit": commit,
    "upload": upload,
    "restore": restore,
    "memory": memory,
    "lora": lora,
    "steps": steps,
    "recovery": recovery,
    "watching": watching,
}

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_REPOSITORY = Path(__file__).parents[1]


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)(MiB|GiB)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: give a size like 64MiB or 4GiB")
    return int(match[1]) << {"MiB": 20, "GiB": 30}[match[2]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--size", type=_bytes, default="1GiB", help="parameters and moments of all ranks; 1GiB")
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=ROWS, action="append", help="a row; may be given more than once")
    parser.add_argument("--quick", action="store_true", help="64MiB and few repetitions: to see that it runs")
    parser.add_argument("--folder", type=Path, default=_REPOSITORY / "build" / "bench", help="on the disk to measure")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    profile = Profile(args.size, _DTYPES[args.dtype], args.ranks, args.folder.resolve())
    if args.quick:
        profile = replace(profile, state_bytes=64 << 20, repetitions=3, quick_repetitions=5)
    figures: list[Figure] = []
    for row in args.only or ROWS:
        for figure in ROWS[row](profile):
            print(f"{figure.as_dict()}", flush=True)
            figures.append(figure)
    size = f"{profile.state_bytes >> 20}MiB"
    told = {"size": size, "dtype": args.dtype, "ranks": args.ranks, "only": args.only or []}
    print(write(_REPOSITORY / "benchmarks" / "results", told, machine(profile.root), figures))


if __name__ == "__main__":
    main()
