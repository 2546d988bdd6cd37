"""Programs of the system that faults use: mount(8), nft(8) and the like."""

import subprocess

from checkpointing.errors import ConfigError


def run(*command: str, told: str | None = None) -> str:
    """What it prints; `told` is its standard input. Raises ConfigError with what it complains of: it is not installed,
    or not allowed."""
    try:
        done = subprocess.run(command, input=told, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        raise ConfigError(done.stderr.strip() or f"{command[0]} ended with {done.returncode}")
    return done.stdout
