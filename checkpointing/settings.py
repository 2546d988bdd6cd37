"""Where a run's checkpoints go, how many are kept, and what happens when storage is slower than training."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from checkpointing.canonical import digest
from checkpointing.errors import ConfigError
from checkpointing.retention import Keep
from checkpointing.signing import ANYBODY, KEY_VARIABLE, Signer, Signing, Trust
from checkpointing.tiers import Tiers


class Checkpoints(BaseModel):
    """The `checkpoints:` section of a run config."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tiers: tuple[str, ...] = Field(
        default=("file://",),
        min_length=1,
        description="store URLs, nearest first; file:// is the run directory's own store, memory:// each node's RAM",
    )
    keep: dict[str, Keep] = Field(
        default={}, description="{tier: what it keeps}, tiers by scheme (file, s3); one not named keeps everything"
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait", description="what a save does while the one before it is still being written"
    )
    failed_saves: int = Field(default=3, ge=1, description="saves that fail in a row before the run stops")
    failing_seconds: float = Field(
        default=60.0, ge=0, description="and for how long they must have failed by then: short steps save often"
    )
    backlog: int = Field(default=4, ge=1, description="checkpoints that wait for a tier before older ones are let go")
    bandwidth: int | None = Field(default=None, ge=1, description="bytes per second that may be carried to s3 tiers")
    kms_key: str | None = Field(
        default=None, min_length=1, description="key of AWS KMS, id or ARN, with which S3 encrypts what is stored there"
    )
    signing: Signing | None = Field(
        default=None, description="who signs checkpoints, and whose are restored; see docs/security.md"
    )
    drain_seconds: float = Field(default=600.0, ge=0, description="how long a finished run waits for its last tier")

    def urls(self, run_dir: Path) -> list[str]:
        """The tiers of the run in `run_dir`, which "file://" and "memory://" stand for."""
        directory = str(run_dir.resolve())
        own = {"file://": f"file://{directory}/store", "memory://": f"memory://{digest(directory.encode())[:16]}"}
        return [own.get(url, url) for url in self.tiers]

    def open(self, run_dir: Path) -> Tiers:
        """The tiers of the run in `run_dir`.

        Raises:
            ConfigError: a wrong URL, `keep` names a tier there is not, `kms_key` is for none, or as `Signing.trust`.
        """
        if self.kms_key and not any(url.startswith("s3://") for url in self.tiers):
            raise ConfigError(
                "checkpoints.kms_key: none of checkpoints.tiers is s3://, and no other is encrypted with it"
            )
        tiers = Tiers.open(self.urls(run_dir), kms_key=self.kms_key, trust=self.trust())
        for name in self.keep:
            tiers.tier(name)
        return tiers

    def trust(self) -> Trust:
        """Raises like `Signing.trust`."""
        return self.signing.trust() if self.signing else ANYBODY

    def signer(self) -> Signer | None:
        """Who signs what a run with these settings commits; None if nobody does.

        Raises:
            ConfigError: signatures are required and there is no key to sign with, or as `Signing.signer`.
        """
        signer = self.signing.signer() if self.signing else None
        if self.signing and self.signing.required and signer is None:
            raise ConfigError(
                "checkpoints.signing: signatures are required, and there is no key to sign with: what this run saves"
                f" could not be restored. Set key_file or {KEY_VARIABLE}"
            )
        return signer

    @classmethod
    def from_environment(cls) -> Self:
        """As HARNESS_CHECKPOINTS says in JSON. Raises ConfigError: it is not this schema."""
        try:
            return cls.model_validate_json(os.environ.get("HARNESS_CHECKPOINTS", "{}"))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "JSON"
            raise ConfigError(f"HARNESS_CHECKPOINTS: {where}: {first['msg']}") from error
