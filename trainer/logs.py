"""Where ranks leave what they say. SkyRL has them write to one file, named in the environment; here each has its own.

Who gathers it (harness/logs.py) reads role, rank and pid from the file's name.
"""

import os
import time
from pathlib import Path

SHARED = "SKYRL_LOG_FILE"


def log_environment(directory: Path, through_driver: bool) -> dict[str, str]:
    """What ranks of a run in `directory` need in their environment. `through_driver`: Ray carries their lines to the
    driver, since nobody reads what they leave on other machines."""
    logs = directory.resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = {SHARED: str(logs / f"ranks-{time.strftime('%Y%m%d-%H%M%S')}.log")}
    return env | ({"SKYRL_DUMP_INFRA_LOG_TO_STDOUT": "1"} if through_driver else {})


def use_own_log(role: str, rank: int) -> None:
    """From now on SkyRL sends what this process says to a file of its own. Nothing happens where there is no file."""
    if shared := os.environ.get(SHARED):
        os.environ[SHARED] = f"{shared.removesuffix('.log')}-{role}-{rank}-{os.getpid()}.log"
