"""The doctor on a real engine, and on one that does each thing wrong: it must be able to say no."""

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.config import flatten
from harness.doctor import examine_engine
from harness.engines import EnginePool
from trainer.engine import wait_until_healthy


def test_a_real_cpu_engine_keeps_what_resume_needs(engines: EnginePool, task: dict[str, Any]) -> None:
    engines.start_missing()
    wait_until_healthy(engines.urls)
    findings = examine_engine(engines.urls[0], flatten(task["skyrl"])["trainer.policy.model.path"])
    assert len(findings) == 3
    assert all(findings.values()), findings


class Wrong(BaseHTTPRequestHandler):
    """Answers in the engine's format. `fault`: which property is broken."""

    fault = "none"
    busy = 0

    def do_POST(self) -> None:
        Wrong.busy += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, sampling = request["token_ids"], request["sampling_params"]
        rng = random.Random(json.dumps([prompt, sampling.get("seed")]))
        if Wrong.fault == "repeatable":
            rng = random.Random()
        if "prompt_logprobs" in sampling:
            off = 0.25 if Wrong.fault == "prefill" else 0.0
            answer: dict[str, Any] = {"prompt_logprobs": [{str(t): {"logprob": -t / 10 + off}} for t in prompt]}
        else:
            threading.Event().wait(0.05)
            off = 0.5 if Wrong.fault == "batch" and Wrong.busy > 1 else 0.0
            tokens = [rng.randrange(5) for _ in range(sampling["max_tokens"])]
            content = [{"logprob": -token / 10 + off} for token in tokens]
            answer = {"choices": [{"token_ids": tokens, "logprobs": {"content": content}}]}
        body = json.dumps(answer).encode()
        Wrong.busy -= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def wrong_engine() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Wrong)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("none", [True] * 3),
        ("repeatable", [False] * 2),
        ("batch", [True, False, True]),
        ("prefill", [True, True, False]),
    ],
)
def test_it_says_no_where_it_should(wrong_engine: str, tmp_path: Path, fault: str, expected: list[bool]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    Wrong.fault = fault
    findings = list(examine_engine(wrong_engine, str(tmp_path)).values())
    assert findings[: len(expected)] == expected
