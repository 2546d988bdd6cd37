"""`checkpoints.kms_key` reaches every process that writes to S3, not the driver alone.

What drivers and the replicator process store is in test_s3_access.py; here are the keepers, which write most of it, and
whoever opens a store at all.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainer.keeper
import trainer.upkeep
from checkpointing.replicator import Job
from checkpointing.settings import Checkpoints
from checkpointing.staging import Staged, StagedShard, StagingBuffer
from checkpointing.store import open_store
from harness.runs import checkpoints_of, leave_tiers
from harness.weed import KMS_KEY, Weed
from trainer.keeper import start_keepers

from .test_s3_access import encryption

ROOT = Path(__file__).parents[2]


@pytest.fixture
def staged() -> Iterator[Staged]:
    buffer = StagingBuffer()
    buffer.reserve(8)[:8] = b"8 bytes."
    shard = StagedShard("policy/parameters", 0, 8, {}, b"null")
    yield Staged("policy", 0, 1, buffer.path, 8, [shard])
    buffer.close()


@pytest.mark.parametrize("kms_key", [KMS_KEY, None])
def test_what_a_keeper_stores_is_encrypted(
    s3_url: str, s3: Weed, staged: Staged, monkeypatch: pytest.MonkeyPatch, kms_key: str | None
) -> None:
    """As `start_keepers` starts it, but in this process instead of one of Ray's."""
    monkeypatch.setattr("trainer.keeper.ignore_sigterm", lambda: None)
    started = []

    def options(**_: object) -> Any:
        return SimpleNamespace(remote=lambda *args: started.append(trainer.keeper._Keeper(*args)))

    monkeypatch.setattr("trainer.keeper.Keeper", SimpleNamespace(options=options))
    start_keepers([s3_url], ["ab" * 28], kms_key=kms_key)
    [keeper] = started
    keeper.write(staged)
    keys = [item.key for item in open_store(s3_url).list("blobs/")]
    assert len(keys) == 2
    assert {encryption(s3, s3_url, key) for key in keys} == {("aws:kms", KMS_KEY) if kms_key else (None, None)}


def test_the_replicator_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: commands.append(command))
    settings = Checkpoints(tiers=("file://", "s3://bucket/prefix"), kms_key=KMS_KEY)
    run: Any = SimpleNamespace(
        directory=tmp_path,
        urls=settings.urls(tmp_path),
        settings=settings,
        tiers=settings.open(tmp_path),
        attempt=SimpleNamespace(attempt=1),
    )
    trainer.upkeep.Replicas().start(run)
    assert Job.model_validate_json(commands[0][-1]).kms_key == KMS_KEY


def test_commands_that_write_later_find_it_in_the_run_directory(tmp_path: Path) -> None:
    """Such as `harness repair` and `harness export --promote`."""
    settings = Checkpoints(tiers=("file://", "s3://bucket/prefix"), kms_key=KMS_KEY)
    leave_tiers(tmp_path, settings)
    assert checkpoints_of(tmp_path) == settings


OPENERS = {"open_store", "Tiers.open", "start_keepers", "Job"}
"""What takes a key of KMS, for whoever writes."""

WITHOUT = {
    "checkpointing/tiers.py open: open_store(url)": "where it is not s3://",
    "trainer/keeper.py start_keepers: Tiers.open(urls)": "looks whether there is a memory tier",
    "trainer/keeper.py sources: Tiers.open(urls)": "what ranks restore from; they write through keepers",
    "harness/runs.py find_run: Tiers.open([run])": "a store's URL says nothing of keys; see docs/security.md",
    "chaos/damage.py note_blob: open_store(scene.store)": "reads",
    "chaos/damage.py note_record: open_store(scene.store)": "reads",
    "chaos/damage.py read: open_store(scene.store)": "reads",
    "chaos/damage.py delete: open_store(scene.store)": "writes no bytes",
    "chaos/damage.py write: open_store(scene.store)": "damage, which only a drill does",
}
"""{call: why it needs none}"""


def calls(package: str) -> Iterator[str]:
    """`file function: call` of each call of an opener."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and ast.unparse(node.func) in OPENERS:
                        yield f"{path.relative_to(ROOT)} {function.name}: {ast.unparse(node)}"


def test_whoever_opens_a_store_for_writing_passes_it_on() -> None:
    found = [call for package in ("checkpointing", "trainer", "harness", "chaos") for call in calls(package)]
    assert {call for call in found if "kms_key" not in call} == WITHOUT.keys()
    assert [call for call in found if call.startswith("trainer/resumable.py start_keepers: ")]
