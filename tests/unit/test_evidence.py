"""What is said about a death: the words of what died first, without secrets, and whether memory ran out."""

from pathlib import Path

import pytest

from harness.ending import LINES, first_dead, last_lines, last_words, oom_kills


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == [] and last_words(log) == "no output"
    log.write_text("".join(f"line {n}\n\n" for n in range(100_000)) + "cut o")
    assert last_lines(log) == [f"line {n}" for n in range(100_000 - LINES + 1, 100_000)] + ["cut o"]
    log.write_bytes(b"\xff not text \n" + b"x" * 5000)
    assert [len(line) for line in last_lines(log)] == [11, 500]
    log.write_text("error: the cause\nsome thread still talks\n")
    assert last_words(log) == "error: the cause"


def test_values_of_secret_variables_are_not_repeated(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("login hunter2-and-more failed for me, hunter2, at host\n")
    environment = {"WANDB_API_KEY": "hunter2-and-more", "HF_TOKEN": "hunter2", "HOST": "host", "EMPTY_SECRET": ""}
    assert last_lines(log, environment) == ["login *** failed for me, ***, at host"]


def test_the_log_of_the_rank_that_died_first(tmp_path: Path) -> None:
    driver, logs = tmp_path / "attempt.log", tmp_path / "scratch" / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    for pid, text in ((12, "CUDA error"), (123, "followed"), (77, "")):
        (logs / f"worker-abc-01000000-{pid}.err").write_text(text)
    scratch = tmp_path / "scratch"
    assert first_dead("error: policy rank 1 (pid 12) died at step 3", driver, scratch).name.endswith("-12.err")
    for words in ("error: policy rank 1 (pid 77) died", "error: policy rank 0 (pid 5) died", "error: a rank died"):
        assert first_dead(words, driver, scratch) == driver


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pod" / "run").mkdir(parents=True)
    return tmp_path


def cgroup(root: Path, line: str) -> Path:
    own = root / "own"
    own.write_text(line + "\n")
    return own


def test_kills_for_want_of_memory_are_counted_where_the_kernel_counts_them(root: Path) -> None:
    own = cgroup(root, "0::/pod/run")
    assert oom_kills(root, own) == 0
    (root / "pod" / "run" / "memory.events").write_text("low 0\noom 1\noom_kill 1\noom_group_kill 9\n")
    assert oom_kills(root, own) == 1
    (root / "pod" / "memory.events").write_text("oom_kill 3\n")
    assert oom_kills(root, own) == 3, "a limit further up counts as well"
    (root / "memory.events").write_text("oom_kill 4\n")
    assert oom_kills(root, cgroup(root, "0::/")) == 4, "as a container sees its own"
    assert oom_kills(root, root / "nowhere") == 0


def test_the_first_version_of_control_groups(root: Path) -> None:
    folder = root / "memory" / "docker" / "x"
    folder.mkdir(parents=True)
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    own = root / "own"
    own.write_text("5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n")
    assert oom_kills(root, own) == 2
