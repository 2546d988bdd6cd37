"""Every backend keeps the contract of Store; the posix one also keeps its promises through crashes and refusals."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Buffer, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checkpointing.blobs import Blob, get_blob, put_blob, require_present
from checkpointing.errors import ConfigError, CorruptBlob, FormatError, StoreError
from checkpointing.store import AlreadyExists, KeyMissing, Store, check_key, open_store
from checkpointing.stores.memory import MemoryStore
from checkpointing.tiers import Tiers

from .checkpoint_samples import Crash, listen

Opener = Callable[[], Store]

ODD = "runs [1] ? * # %20 ü"

# A new backend is one line here: {name: opens the store that belongs to a test's folder}.
BACKENDS: dict[str, Callable[[Path], Store]] = {
    "posix": lambda folder: open_store(f"file://{folder}/{ODD}/store"),
    "memory": lambda folder: MemoryStore(folder / ODD / "node"),
    "tiers": lambda folder: Tiers.open([f"file://{folder}/{ODD}/near", f"file://{folder}/{ODD}/far"]),
    "s3": lambda folder: open_store(f"s3://lab{folder}/{ODD}/store"),
    "fsspec-memory": lambda folder: open_store(f"fsspec+memory://{folder}/{ODD}"),
    "fsspec-file": lambda folder: open_store(f"fsspec+file://{folder}/{ODD}"),
    "fsspec-s3": lambda folder: open_store(f"fsspec+s3://lab{folder}/{ODD}"),
}

BAD_KEYS = ["", "/", "/etc/passwd", "../up", "a/../b", "a/..", ".", "a//b", "a/", ".hidden", "a b", "a\n", "a*", "ü"]


@pytest.fixture(params=BACKENDS)
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    if "s3" in request.param:
        request.getfixturevalue("s3")
    return lambda: BACKENDS[request.param](tmp_path)


@pytest.fixture
def store(reopen: Opener) -> Store:
    return reopen()


class TestContract:
    """What the rest of the harness relies on, whatever the backend."""

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 20_000, memoryview(b"abc")[1:], bytearray(b"ab")])
    def test_what_is_put_is_got(self, store: Store, data: Buffer) -> None:
        store.put("a/b/c", data)
        assert store.get("a/b/c") == bytes(data)

    @pytest.mark.parametrize("after", [b"", b"short", b"exactly-16-bytes", b"longer than what was there"])
    def test_put_replaces(self, store: Store, after: bytes) -> None:
        store.put("key", b"sixteen bytes ..")
        store.put("key", after)
        assert store.get("key") == after

    def test_nothing_is_got_that_was_not_put(self, store: Store) -> None:
        store.put("a/b", b"x")
        for key in ["a", "c", "a/c", "a/b/c"]:
            with pytest.raises(KeyMissing, match=key):
                store.get(key)

    def test_delete(self, store: Store) -> None:
        store.put("a/b", b"x")
        store.put("a/c", b"y")
        for key in ["a/b", "a/b", "a", "never/there"]:
            store.delete(key)
        assert [item.key for item in store.list("")] == ["a/c"]
        with pytest.raises(KeyMissing):
            store.get("a/b")

    def test_list(self, store: Store) -> None:
        assert list(store.list("")) == []
        for key in ["b/2", "b/10", "b/x/y", "bb/1", "a"]:
            store.put(key, key.encode())
        assert [tuple(item) for item in store.list("")] == [
            ("a", 1),
            ("b/10", 4),
            ("b/2", 3),
            ("b/x/y", 5),
            ("bb/1", 4),
        ]
        assert [item.key for item in store.list("b/")] == ["b/10", "b/2", "b/x/y"]
        assert [item.key for item in store.list("b")] == ["b/10", "b/2", "b/x/y", "bb/1"]
        assert [item.key for item in store.list("b/1")] == ["b/10"]
        assert list(store.list("c/")) == list(store.list("a/")) == []

    def test_another_process_sees_every_change(self, store: Store, reopen: Opener) -> None:
        other = reopen()
        assert list(other.list("")) == []
        store.put("a", b"1")
        assert other.get("a") == b"1"
        store.put("a", b"22")
        assert other.get("a") == b"22"
        assert other.list("")[0].size == 2
        store.delete("a")
        assert list(other.list("")) == []

    def test_create_succeeds_once(self, store: Store, reopen: Opener) -> None:
        store.create("a/key", b"first")
        for later in [store, reopen()]:
            with pytest.raises(AlreadyExists, match="key"):
                later.create("a/key", b"second")
        assert store.get("a/key") == b"first"

    def test_of_many_creators_one_wins(self, reopen: Opener, request: pytest.FixtureRequest) -> None:
        def attempt(store: Store, key: str, mine: bytes) -> bytes | None:
            barrier.wait()
            try:
                store.create(key, mine)
            except AlreadyExists:
                return None
            return mine

        stores = [reopen() for _ in range(6)]
        barrier = threading.Barrier(len(stores))
        with ThreadPoolExecutor(len(stores)) as pool:
            for turn in range(5 if "s3" in request.node.name else 15):  # there, losers wait for seconds
                key = f"commits/{turn}"
                tries = [pool.submit(attempt, store, key, b"%d" % i) for i, store in enumerate(stores)]
                assert [one.result() for one in tries if one.result()] == [stores[0].get(key)]

    def test_readers_never_see_half_a_value(self, store: Store, reopen: Opener) -> None:
        values = {bytes([letter]) * 200_000 for letter in b"abc"}
        store.put("key", min(values))
        done = threading.Event()

        def read() -> set[bytes]:
            mine, seen = reopen(), set()
            while not done.is_set():
                seen.add(mine.get("key"))
            return seen

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            for _ in range(20):
                for value in sorted(values):
                    store.put("key", value)
            done.set()
        assert reader.result() <= values

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_no_verb_takes_a_bad_key(self, store: Store, key: str) -> None:
        calls: list[Callable[[str], object]] = [store.get, store.delete]
        for call in calls:
            with pytest.raises(FormatError, match="not a key"):
                call(key)
        for write in [store.put, store.create]:
            with pytest.raises(FormatError, match="not a key"):
                write(key, b"")

    @pytest.mark.parametrize("prefix", ["../", "/", "a/../", ".", "a//"])
    def test_no_list_climbs_out(self, store: Store, prefix: str) -> None:
        with pytest.raises(FormatError, match="not a key"):
            store.list(prefix)


@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "", "a", "-", "a.b"])).map("/".join))
@example("a/../../b")
def test_a_key_stays_below_the_root(key: str) -> None:
    try:
        check_key(key)
    except FormatError:
        return
    assert os.path.normpath(f"/root/{key}") == f"/root/{key}" != "/root/"


def test_open_store_writes_nothing(tmp_path: Path) -> None:
    for url in [f"file://{tmp_path}/a", f"{tmp_path}/b"]:
        assert list(open_store(url).list("")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_plain_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    monkeypatch.chdir("/")
    store.put("a", b"x")
    assert (tmp_path / "runs" / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "absolute path"),
        ("file://", "absolute path"),
        ("file://data/run", "absolute path"),
        ("gs://b/k", "scheme 'gs'"),
    ],
)
def test_a_bad_url_is_a_config_error(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_store(url)


# The posix backend: crashes


POINTS = {
    "put": ["store.put_written", "store.put_renamed"],
    "create": ["store.create_written", "store.create_linked"],
}
NEW_IS_VISIBLE = {"store.put_renamed", "store.create_linked"}

_KILLED_WRITER = """
import os, signal, sys
from checkpointing.stores.memory import MemoryStore
from checkpointing.tiers import Tiers
from checkpointing.store import open_store
def die(name, where):
    if name == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    getattr(open_store(sys.argv[1]), sys.argv[2])("a/key", b"new" * 1000)
"""


@pytest.mark.parametrize(("verb", "point"), [(verb, point) for verb, points in POINTS.items() for point in points])
def test_sigkill_leaves_all_or_nothing(tmp_path: Path, verb: str, point: str) -> None:
    (tmp_path / "writer.py").write_text(_KILLED_WRITER)
    store = open_store(str(tmp_path / "store"))
    if verb == "put":
        store.put("a/key", b"old")
    environment = os.environ | {
        "HARNESS_PHASE_LISTENER": "writer:die",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]),
    }
    command = [sys.executable, str(tmp_path / "writer.py"), str(tmp_path / "store"), verb, point]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    if point in NEW_IS_VISIBLE:
        assert store.get("a/key") == b"new" * 1000
    elif verb == "put":
        assert store.get("a/key") == b"old"
    else:
        assert list(store.list("")) == []
        store.create("a/key", b"next")  # what was left behind is in nobody's way


def test_a_file_gets_its_name_when_its_bytes_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power cut can't hurt: bytes, name, and the names of the folders that lead to it."""
    log: list[str] = []
    fsync = os.fsync

    def logged_fsync(fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        log.append("fsync temp" if name.startswith(".tmp-") else f"fsync {name}")
        fsync(fd)

    def logged(write: Callable[[str, bytes], None], key: str) -> list[str]:
        log.clear()
        write(key, b"x")
        return log

    monkeypatch.setattr(os, "fsync", logged_fsync)
    listen(monkeypatch, lambda name, where: log.append(name.removeprefix("store.")))
    root = tmp_path / "store"
    store = open_store(str(root))
    folders = [f"fsync {folder.name}" for folder in [*root.parents, root, root / "blobs"]]
    put = ["fsync temp", "put_written", "put_renamed", "fsync ab"]
    assert logged(store.put, "blobs/ab/one") == [*folders, *put]
    assert logged(store.put, "blobs/ab/two") == put
    assert logged(store.create, "blobs/ab/once") == ["fsync temp", "create_written", "create_linked", "fsync ab"]
    assert logged(lambda key, _: store.delete(key), "blobs/ab/once") == ["fsync ab"]


def test_what_exists_already_is_made_durable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that was killed between rename and last fsync left a name that a power cut would take away."""

    def die(name: str, where: dict[str, str]) -> None:
        if name in NEW_IS_VISIBLE:
            raise Crash

    with monkeypatch.context() as patched:
        listen(patched, die)
        store = open_store(str(tmp_path))
        with pytest.raises(Crash):
            store.put("a/blob", b"x")
        with pytest.raises(Crash):
            store.create("a/record", b"x")
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    store = open_store(str(tmp_path))
    store.put("a/blob", b"x")
    assert tmp_path / "a" / "blob" in synced and synced[-1] == tmp_path / "a"
    synced.clear()
    with pytest.raises(AlreadyExists):
        store.create("a/record", b"y")
    assert synced[-1] == tmp_path / "a"


def test_nothing_is_left_beside_what_was_written(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for write, key in [(store.put, "put"), (store.put, "put"), (store.create, "created")]:
        write(key, b"x")
    with pytest.raises(AlreadyExists):
        store.create("created", b"y")
    assert {path.name for path in tmp_path.iterdir()} == {"put", "created"}
    assert (tmp_path / "created").stat().st_nlink == 1


def test_abandoned_temporary_files_are_invisible_and_go_after_a_day(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    old, young = tmp_path / "a" / ".tmp-1-dead", tmp_path / "a" / ".tmp-2-alive"
    for file in [old, young]:
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    gone = tmp_path / "a" / ".tmp-3-renamed"
    gone.symlink_to(tmp_path / "gone")  # seen in the folder, but no longer there when looked at
    store = open_store(str(tmp_path))
    assert list(store.list("")) == []
    assert old.exists()  # reading changes nothing
    store.put("a/key", b"x")
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [young.name, gone.name, "key"]


# The posix backend: refusals


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, after what fits has been written: like a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_no_space_leaves_what_was_there(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/key", b"old")
    for write in [store.put, store.create]:
        with (
            file_size_limit(10_000),
            pytest.raises(StoreError, match=r"a/(key|new): File too large; raise the file size"),
        ):
            write("a/key" if write == store.put else "a/new", bytes(20_000))
    assert store.get("a/key") == b"old"
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["key"]
    store.put("a/key", bytes(20_000))  # once there is space, nothing is in the way


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device; free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "give this user read and write permission"),
        (errno.EIO, "check that file system"),
    ],
)
def test_a_refusal_says_what_where_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(fd: int, data: Buffer) -> int:
        raise OSError(number, os.strerror(number))

    store = open_store(str(tmp_path))
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(StoreError, match=f"cannot write {tmp_path}/a/key: .*{advice}"):
        store.put("a/key", b"x")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_file_where_the_folder_should_be_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StoreError, match="store"):
        open_store(str(tmp_path / "store")).put("a", b"x")


# Blobs


def test_a_blob_is_named_by_its_content(store: Store) -> None:
    blob = put_blob(store, b"content")
    assert blob == Blob(digest="3fba5250be9ac259c56e7250c526bc83bacb4be825f2799d3d59e5b4878dd74e", size=7)
    assert [tuple(item) for item in store.list("")] == [(f"blobs/3f/{blob.digest}", 7)]
    assert get_blob(store, blob) == b"content"


def test_the_same_blob_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written = open_store(str(tmp_path)), []
    listen(monkeypatch, lambda name, where: written.append(name))
    put_blob(store, b"content")
    assert written
    written.clear()
    put_blob(store, b"content")
    assert not written


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "cut short": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_blob_is_never_returned_and_is_healed_by_the_next_save(store: Store, damage: str) -> None:
    data = bytes(range(256)) * 5000
    blob = put_blob(store, data)
    store.put(blob.key, DAMAGES[damage](data))
    with pytest.raises(CorruptBlob, match=blob.key):
        get_blob(store, blob)
    if "flipped" not in damage:
        with pytest.raises(CorruptBlob, match=blob.key):
            require_present(store, blob)
    # A resumed run computes the very same blob again. It must not take the damaged one for it.
    put_blob(store, data)
    assert get_blob(store, blob) == data
    require_present(store, blob)


def test_a_reference_with_another_size_is_not_this_blob(store: Store) -> None:
    blob = put_blob(store, b"content")
    with pytest.raises(CorruptBlob, match="7 bytes, 8 expected"):
        get_blob(store, Blob(digest=blob.digest, size=8))


def test_a_missing_blob_is_corruption(store: Store) -> None:
    blob = Blob.of(b"never written")
    for check in [get_blob, require_present]:
        with pytest.raises(CorruptBlob, match=blob.key):
            check(store, blob)
