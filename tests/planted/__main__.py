"""python -m tests.planted [--only NAME,...] [--clean N]: drills on the real stack, a line each, and the two rates.

Every defect of `defects.py` must turn its drill red under its right name; N drills of as many seeds, with nothing
planted, must pass. Exit code 1 if one did not do what it must.
"""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from chaos.judgement import Judgement
from tests.planted.defects import DEFECTS
from tests.planted.drills import Planted

ITSELF = "baseline compared with itself"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*DEFECTS, ITSELF]
    parser.add_argument("--only", default=",".join(names), help="defects, separated by commas; '' for none")
    parser.add_argument("--clean", type=int, default=20, metavar="N", help="drills with nothing planted (default 20)")
    told = parser.parse_args()
    chosen = [name for name in told.only.split(",") if name]
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no such defect: {', '.join(unknown)}; there are {', '.join(names)}")
    os.environ["PYTHONPATH"] = str(Path.cwd())
    with Planted(Console(stderr=True)) as drills:
        missed = [name for name in chosen if not _seen(name, drills)]
        alarms = [seed for seed in range(1, told.clean + 1) if not _passes(seed, drills)]
    print(f"missed: {len(missed)} of {len(chosen)} defects; false alarms: {len(alarms)} of {told.clean} clean runs")
    return int(bool(missed or alarms))


def _seen(name: str, drills: Planted) -> bool:
    if name == ITSELF:
        judgement, reason, text = drills.itself(), "itself", ""
    else:
        judgement, (reason, text) = drills.meet(name), DEFECTS[name][1:3]
    right = says(judgement, reason, text)
    _say(name, judgement, right)
    return right


def _passes(seed: int, drills: Planted) -> bool:
    judgement = drills.clean(seed)
    _say(f"clean, seed {seed}", judgement, judgement.outcome == "passed")
    return judgement.outcome == "passed"


def says(judgement: Judgement, reason: str, text: str) -> bool:
    """Whether the drill is red, and one of its reasons is the right one."""
    named = any(one.name == reason and text in one.text for one in judgement.reasons)
    return judgement.outcome != "passed" and named


def _say(what: str, judgement: Judgement, right: bool) -> None:
    reasons = "; ".join(str(reason) for reason in judgement.reasons[:3])
    print(f"{'right' if right else 'WRONG'}  {what}: {judgement.outcome} {reasons}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
