"""What `harness submit` does: give a run to a Ray cluster's job server, by Ray's Jobs API, and leave.

The job is `harness run` on the cluster's head, with the config in its command line. It is no business of this process
any more: the supervisor there does what it does anywhere, and the run's directory and stores say how it is.
"""

import importlib.util
import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from checkpointing.canonical import digest
from checkpointing.errors import ConfigError
from checkpointing.redaction import redacted
from harness.clusters import variables
from harness.config import RunConfig, flatten, load_config
from harness.living import HEARD_WITHIN
from harness.output import say

PLUGIN = "sagemaker_ray"
PLUGIN_PACKAGE = "toolkit-for-ray-on-sagemaker-ai"

_END = "END-OF-CONFIG"


def submit_run(path: Path, address: str, console: Console) -> None:
    """Have the cluster at `address` run the config at `path`, as `harness run` does.

    Raises:
        ConfigError: a wrong config or one that can't be carried, no cluster to be had at `address`, or it runs this
            run already.
    """
    config = load_config(path, RunConfig)
    entrypoint = f"harness run /dev/stdin <<'{_END}'\n{carried(config, path)}{_END}\n"
    stop_seconds = math.ceil(config.supervision.grace_seconds + HEARD_WITHIN)
    with _explained(address):
        client = _client(address)
        submission = _next_submission(config.run_dir, client.list_jobs(), address)
        try:
            # `ray job stop` asks by SIGTERM; without this it kills after 3 s.
            env = {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_seconds)}
            client.submit_job(entrypoint=entrypoint, submission_id=submission, runtime_env={"env_vars": env})
        except RuntimeError as error:
            if "already exists" not in str(error):
                raise
            raise _at_work(config.run_dir, submission, address) from error  # somebody has submitted it since we looked
    run, where = shlex.quote(str(config.run_dir)), shlex.quote(redacted(address))
    say(console, f"submitted: {submission}")
    say(console, f"  its output   ray job logs {submission} --address {where} --follow")
    say(console, f"  how it is    harness status {run}    where that directory is mounted")
    say(console, f"  end it       harness stop {run}, or ray job stop {submission} --address {where}: both save first")
    say(console, "  go on        the same command again, on any cluster that reaches the run's directory or stores")


def carried(config: RunConfig, path: Path) -> str:
    """What `config` says, as YAML for the cluster: there it joins the cluster that runs it. `path`: where it is from.

    YAML, as JSON's 1e-05 would be read as a string.

    Raises:
        ConfigError: on the cluster it would mean something else, or it would let others read a secret.
    """
    if not config.run_dir.is_absolute():
        raise ConfigError(f"{path}: run_dir: {config.run_dir} is relative; name a path that the whole cluster shares")
    said = config.model_dump(mode="json", exclude_unset=True) | {"ray_address": "auto"}
    for key, value in flatten(said).items():
        if redacted(line := f"{key}: {value}") != line:
            raise ConfigError(
                f"{path}: {key}: looks like a secret, and who sees the cluster's jobs would see it; set it in the "
                "environment of the cluster's processes"
            )
    return yaml.safe_dump(said, sort_keys=False)


def _client(address: str) -> Any:
    scheme = address.partition("://")[0]
    if scheme not in ("http", "https", PLUGIN) or "://" not in address:
        raise ConfigError(
            f"{redacted(address)}: name the cluster's dashboard: http://HOST:8265, or {PLUGIN}://CLUSTER/NAMESPACE"
        )
    if scheme == PLUGIN and importlib.util.find_spec(PLUGIN) is None:
        raise ConfigError(f"{address}: {PLUGIN}:// needs AWS's toolkit: pip install {PLUGIN_PACKAGE}")

    from ray.job_submission import JobSubmissionClient

    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    with variables({"RAY_API_SERVER_ADDRESS": address}):  # Ray prefers what the environment says to what it is told
        return JobSubmissionClient(address, headers=headers)


def _next_submission(run_dir: Path, jobs: Iterable[Any], address: str) -> str:
    """NAME-DIGEST-N for the Nth submission of the run to this cluster: Ray takes no id twice, whoever is first.

    Raises:
        ConfigError: one of them has not ended.
    """
    place = os.path.normpath(run_dir)
    name = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', Path(place).name)}-{digest(place.encode())[:8]}"
    numbers = [0]
    for job in jobs:
        stem, _, number = (job.submission_id or "").rpartition("-")
        if stem != name or not number.isdigit():
            continue
        if not job.status.is_terminal():
            raise _at_work(run_dir, job.submission_id, address)
        numbers.append(int(number))
    return f"{name}-{max(numbers) + 1}"


def _at_work(run_dir: Path, submission: str, address: str) -> ConfigError:
    at = redacted(address)
    return ConfigError(
        f"{run_dir}: {at} is at work on it, as {submission}; to end that: harness stop, or ray job stop {submission} "
        f"--address {at}"
    )


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """What Ray, requests and AWS's toolkit raise, each in its own way, as one ConfigError."""
    from ray.exceptions import AuthenticationError

    at = redacted(address)
    try:
        yield
    except ConfigError:
        raise
    except AuthenticationError as error:
        said = _line(error, 0).partition(". ")[0]
        raise ConfigError(f"{at}: {said}; set RAY_AUTH_TOKEN to its token, and RAY_AUTH_MODE to token") from error
    except ConnectionError as error:
        raise ConfigError(f"{at}: can't be reached; is that the dashboard, and is there a port-forward?") from error
    except Exception as error:
        raise ConfigError(f"{at}: nothing was submitted: {_line(error, -1)}") from error


def _line(error: Exception, index: int) -> str:
    """One of the lines that have something to say: a server's refusal ends with a traceback's last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
    return redacted(lines[index].rstrip(".")) if lines else type(error).__name__
