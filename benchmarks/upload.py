"""Uploads to S3: wall time against plain presigned requests, the client's processor time against obstore's own."""

from collections.abc import Iterator
from typing import Any

from benchmarks.profile import Profile
from benchmarks.report import Figure

_CLIENT = "S3Store"


def upload(profile: Profile) -> Iterator[Figure]:
    from benchmarks.s3_clients import CPU_BASE, WALL_BASE, measure

    rows = [row for row in measure(profile.state_bytes) if row["direction"] == "up"]
    for case in dict.fromkeys(row["case"] for row in rows):
        found: dict[str, dict[str, Any]] = {row["client"]: row for row in rows if row["case"] == case}
        for key, base in (("wall_s", WALL_BASE), ("cpu_s", CPU_BASE)):
            name = f"upload of {case}, {key.removesuffix('_s')} / {base}'s"
            yield Figure("upload", name, 1.1, [found[_CLIENT][key]], [found[base][key]], note="medians")
