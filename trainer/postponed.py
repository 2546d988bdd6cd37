"""A driver of standalone engines has no use for vLLM, but SkyRL imports half of it for the name of one class.

That is half of what a driver imports, and a recovery waits for it. The module is imported when more of it is asked for:
where SkyRL starts engines itself.
"""

import importlib
import sys
import types
from typing import Any

_NAME = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap"


class _Postponed(types.ModuleType):
    VLLM_NEW_INFERENCE_WORKER_EXTENSION_CLS = f"{_NAME}.NewInferenceWorkerWrap"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


sys.modules.setdefault(_NAME, _Postponed(_NAME))
