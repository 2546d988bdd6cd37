"""Inference servers of a run: started once, kept warm over every attempt, replaced when they die."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.config import RunConfig, flatten
from harness.processes import free_port, reap, spawn
from trainer.determinism import environment
from trainer.engine import START_SECONDS, can_generate, engine_command, is_healthy

HEALTH_SECONDS = 5.0
"""Between two health checks of an engine that has served."""

ANSWER_SECONDS = 1.0
"""Allowed for an answer to one: the supervisor waits for it, so many hung engines would make it blind to all else."""

FRUITLESS = 3
"""Starts of an engine in a row after which it never served: one more would not help."""


@dataclass
class Engine:
    """One server process, where it listens, whether this process has ever answered, and when it last did (monotonic).

    `fruitless`: starts since it last served, this one among them. `proven`: a process before it has served.
    `lost`: when the one that it replaces was lost (monotonic), until it serves.
    """

    index: int
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    ledger: Path
    served: bool = False
    heard: float = field(default_factory=time.monotonic)
    asked: float = 0.0
    fruitless: int = 1
    proven: bool = False
    lost: float | None = None

    def end(self) -> None:
        """A killed server leaves its core and worker processes behind, over 1 GB each: end all of them."""
        reap(self.ledger)
        self.process.wait()

    def what_is_wrong(self, now: float, silence: float) -> str | None:
        """It has ended, did not come to serve, or has answered nothing for `silence` seconds; None if all is well."""
        if (code := self.process.poll()) is not None:
            return f"ended with {code}"
        if now - self.asked >= HEALTH_SECONDS or not self.served:
            self.asked = now
            if is_healthy(self.url, ANSWER_SECONDS):
                self.served, self.heard, self.fruitless = True, now, 0
        if now - self.heard > (silence if self.served else START_SECONDS):
            return f"answered nothing for {now - self.heard:.0f} s"
        return None


@dataclass
class EnginePool:
    """The engines that `config.engines` asks for; none where SkyRL starts its own. A context manager."""

    config: RunConfig
    logs: Path
    engines: list[Engine] = field(default_factory=list)

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    @property
    def log_paths(self) -> list[Path]:
        return [self._log(index) for index in range(self.config.engines.count if self.config.engines else 0)]

    @property
    def can_restart_alone(self) -> bool:
        """Whether an engine can be brought up to date while training goes on: see trainer/client.py."""
        return bool(flatten(self.config.skyrl).get("trainer.policy.model.lora.rank", 0))

    @property
    def starting(self) -> bool:
        """Whether one has not served yet since it was started."""
        return not all(engine.served for engine in self.engines)

    def start_missing(self) -> None:
        """Start every engine that is not running. Returns at once: a server loads while the driver does the same."""
        wanted = self.config.engines.count if self.config.engines else 0
        for engine in self.engines:
            if engine.process.poll() is not None:
                self.restart(engine)
        while len(self.engines) < wanted:
            index = len(self.engines)
            reap(self._ledger(index))  # what a supervisor that was killed has left behind
            self.engines.append(self._start(index, f"http://127.0.0.1:{free_port()}"))

    def restart(self, engine: Engine) -> None:
        """End what is left of it and start it where it was. Returns at once."""
        engine.end()
        again = self._start(engine.index, engine.url)
        again.lost = engine.lost
        again.fruitless, again.proven = engine.fruitless + 1, engine.served or engine.proven
        self.engines[self.engines.index(engine)] = again

    def end_silent(self) -> None:
        """End those that have served and do not now: they run, and would keep the next attempt waiting."""
        for engine in self.engines:
            if engine.served and not (is_healthy(engine.url) and can_generate(engine.url, self._model)):
                engine.end()

    def end_all(self) -> None:
        """`start_missing` replaces them."""
        for engine in self.engines:
            engine.end()

    def returned(self) -> Iterator[tuple[Engine, float]]:
        """Those that were lost and serve again, each once, and so many seconds later."""
        for engine in self.engines:
            if engine.served and engine.lost is not None:
                seconds, engine.lost = time.monotonic() - engine.lost, None
                yield engine, seconds

    def wrong(self) -> tuple[Engine, str] | None:
        """An engine that has ended or is silent, and how, if there is one."""
        silence = self.config.supervision.engine_seconds
        for engine in self.engines:
            if wrong := engine.what_is_wrong(time.monotonic(), silence):
                return engine, wrong
        return None

    @property
    def _model(self) -> str:
        return str(flatten(self.config.skyrl)["trainer.policy.model.path"])

    def _log(self, index: int) -> Path:
        return self.logs / f"engine-{index}.log"

    def _ledger(self, index: int) -> Path:
        return self.logs / f"engine-{index}.sessions"

    def _start(self, index: int, url: str) -> Engine:
        assert self.config.engines is not None
        skyrl = flatten(self.config.skyrl)
        command = engine_command(
            model=self._model,
            port=int(url.rpartition(":")[2]),
            lora_rank=skyrl.get("trainer.policy.model.lora.rank", 0),
            dtype=skyrl.get("generator.inference_engine.model_dtype", "bfloat16"),
            device=self.config.device,
            args=self.config.engines.args,
            continuation=self.config.engines.continuation,
        )
        log, ledger = self._log(index), self._ledger(index)
        process = spawn(command, os.environ | environment(self.config.device), log, ledger)
        return Engine(index, process, url, log, ledger)
