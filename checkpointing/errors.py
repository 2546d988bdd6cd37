"""Every error a user can meet, with the exit code `harness` ends with.

    HarnessError                     1   a bug of ours: please report it
    |- ConfigError                  10   unknown key, wrong type, missing model or data path, no cluster to submit to
    |- RunMismatch                  11   the run directory belongs to another config, dataset or tokenizer
    |- CheckpointError              12   a checkpoint cannot be used
    |  |- FormatError                    foreign or newer format version, tampered record, path that climbs out
    |  |- CorruptBlob                    a blob or record is missing or does not match its digest
    |  |- MissingEntry                   a State entry is absent; nothing "starts from the beginning"
    |  `- TopologyMismatch               the shards of some ranks are missing
    |- StoreError                   13   storage refused: no space, read-only, permission
    |  |- KeyMissing                     nothing is stored under that key
    |  `- AlreadyExists                  that key may be created only once, and it has been
    |- DivergenceError              14   a re-reached step differs from what was committed
    |- StepsMissing                 15   planned N steps, ran M
    |- Fenced                       16   a newer attempt of this run exists
    |- WorkerLost                   17   a rank, engine or node died: the supervisor starts the next attempt
    |  `- RankLost                       it was a rank: the driver tries to rebuild its group first
    |- AttemptsExhausted            18   the hour's restart budget is spent
    |- EngineMismatch               19   an engine does not sample from the weights that are trained
    |- NoProgress                   23   attempts in a row got no step further
    |- Poisoned                     24   a step fails again and again, from an older checkpoint too
    |- NonFinite                    25   a loss, a gradient or the State is NaN or infinite; nothing of it was saved
    |- ClusterTooSmall              26   nodes are missing and did not come back in time
    `- Preempted                    75   asked to stop, and did: start the same command again to go on

0 is success. `harness verify` and `drill` add 20 (runs differ; a drill failed) and 21 (can't tell), `harness check` and
`repair` 22 (something is damaged, but the newest checkpoint restores). 75 is EX_TEMPFAIL of sysexits.h.
"""

from typing import ClassVar


class HarnessError(Exception):
    """Base of all errors; `exit_code` is what the process ends with."""

    exit_code: ClassVar[int] = 1


class ConfigError(HarnessError):
    exit_code = 10


class RunMismatch(HarnessError):
    exit_code = 11


class CheckpointError(HarnessError):
    exit_code = 12


class FormatError(CheckpointError):
    pass


class CorruptBlob(CheckpointError):
    pass


class MissingEntry(CheckpointError):
    pass


class TopologyMismatch(CheckpointError):
    pass


class StoreError(HarnessError):
    exit_code = 13


class KeyMissing(StoreError):
    pass


class AlreadyExists(StoreError):
    pass


class DivergenceError(HarnessError):
    exit_code = 14


class StepsMissing(HarnessError):
    exit_code = 15


class Fenced(HarnessError):
    exit_code = 16


class WorkerLost(HarnessError):
    exit_code = 17


class RankLost(WorkerLost):
    pass


class AttemptsExhausted(HarnessError):
    exit_code = 18


class EngineMismatch(HarnessError):
    exit_code = 19


class NoProgress(HarnessError):
    exit_code = 23


class Poisoned(HarnessError):
    exit_code = 24


class NonFinite(HarnessError):
    exit_code = 25


class ClusterTooSmall(HarnessError):
    exit_code = 26


class Preempted(HarnessError):
    exit_code = 75


VERIFY_DIFFERENT = 20
VERIFY_CANNOT_TELL = 21
CHECK_DAMAGED = 22
