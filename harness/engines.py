"""Inference servers of a run: started once, kept warm over every attempt, replaced when they die."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from harness.config import RunConfig, flatten
from harness.processes import free_port, reap, spawn
from trainer.determinism import environment
from trainer.engine import engine_command, is_healthy


@dataclass
class Engine:
    """One server process, where it listens, and whether it has ever answered."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    ledger: Path
    served: bool = False

    def end(self) -> None:
        """A killed server leaves its core and worker processes behind, over 1 GB each: end all of them."""
        reap(self.ledger)
        self.process.wait()


@dataclass
class EnginePool:
    """The engines that `config.engines` asks for; none where SkyRL starts its own. A context manager."""

    config: RunConfig
    logs: Path
    engines: list[Engine] = field(default_factory=list)

    def __enter__(self) -> "EnginePool":
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.end()

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def start_missing(self) -> None:
        """Start every engine that is not running. Returns at once: a server loads while the driver does the same."""
        wanted = self.config.engines.count if self.config.engines else 0
        for engine in [engine for engine in self.engines if engine.process.poll() is not None]:
            engine.end()
            self.engines.remove(engine)
        while len(self.engines) < wanted:
            self.engines.append(self._start(len(self.engines)))

    def lost(self) -> Engine | None:
        """An engine whose process has ended, if there is one."""
        for engine in self.engines:
            if engine.process.poll() is not None:
                return engine
            engine.served = engine.served or is_healthy(engine.url)
        return None

    def _start(self, index: int) -> Engine:
        assert self.config.engines is not None
        skyrl, port = flatten(self.config.skyrl), free_port()
        command = engine_command(
            model=skyrl["trainer.policy.model.path"],
            port=port,
            lora_rank=skyrl.get("trainer.policy.model.lora.rank", 0),
            dtype=skyrl.get("generator.inference_engine.model_dtype", "bfloat16"),
            device=self.config.device,
            args=self.config.engines.args,
        )
        log, ledger = self.logs / f"engine-{index}.log", self.logs / f"engine-{index}.sessions"
        reap(ledger)  # what a supervisor that was killed has left behind
        process = spawn(command, os.environ | environment(self.config.device), log, ledger)
        return Engine(process, f"http://127.0.0.1:{port}", log, ledger)
