"""What a driver need not import it does not, and what it is given instead is what SkyRL says."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

NAME = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap"


def test_a_driver_starts_without_vllm() -> None:
    code = (
        "import trainer.experiment, sys; "
        f"print('vllm' in sys.modules, sys.modules[{NAME!r}].VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS)"
    )
    environment = os.environ | {"HARNESS_DEVICE": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"False {NAME}.NewInferenceWorkerWrap"
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.origin is not None
    said = 'VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS = f"{__name__}.NewInferenceWorkerWrap"'
    assert said in Path(spec.origin).read_text()
