"""Every config in configs/ validates, the one that no machine here can run included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
from pyarrow import parquet
from transformers import Qwen3VLConfig

from harness.config import RunConfig, load_config
from harness.demo import DemoConfig
from trainer.determinism import environment

from .conftest import REPOSITORY, merge

CONFIGS = REPOSITORY / "configs"


def test_our_keys_in_every_config() -> None:
    for path in sorted(CONFIGS.glob("*.yaml")):
        load_config(path, DemoConfig if path.name == "demo.yaml" else RunConfig)


def test_skyrl_accepts_the_six_gpu_config(tmp_path: Path) -> None:
    """With a folder in place of the model and one row in place of the data; paths are all that is exchanged."""
    config = load_config(CONFIGS / "hyperpod.yaml", RunConfig)
    Qwen3VLConfig().save_pretrained(tmp_path)
    rows = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": [1]}), rows)
    here = {
        "data.train_data": [str(rows)],
        "data.val_data": [str(rows)],
        "trainer.policy.model.path": str(tmp_path),
        "trainer.ref.model.path": str(tmp_path),
    }
    overrides = config.model_copy(update={"skyrl": merge(config.skyrl, here)}).skyrl_overrides([])
    code = (
        "import json, sys\n"
        "from trainer.skyrl_config import skyrl_config\n"
        "from trainer.run import topology\n"
        "print('TOPOLOGY ' + json.dumps(topology(skyrl_config(json.loads(sys.argv[1])))))\n"
    )
    # Validated as on a machine without a GPU: the stand-ins for CUDA only make SkyRL importable here.
    env = os.environ | environment("cpu")
    command = [sys.executable, "-c", code, json.dumps(overrides)]
    result = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("TOPOLOGY ")]
    assert lines, result.stderr[-3000:]
    assert json.loads(lines[0].removeprefix("TOPOLOGY ")) == {"policy": 6, "ref": 6}
