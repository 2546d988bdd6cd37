"""What a run is: base models, tokenizer, data and configuration, each by the digest of its content."""

from functools import cache
from pathlib import Path
from typing import Any

from skyrl.train.config import get_config_as_dict

from checkpointing.canonical import canonical_json, digest
from checkpointing.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.bin", "config.json", "generation_config.json")
TOKENIZER = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*")

# Where things lie and how often they are looked at: a run may change these and stay the same run. The number of ranks
# is held against each checkpoint instead (`open_run`), with an error of its own.
LOCATION_KEYS = {
    "trainer": ("ckpt_path", "export_path", "log_path", "logger", "project_name", "run_name", "tags", "resume_mode",
                "resume_path", "ckpt_interval", "hf_save_interval", "max_ckpts_to_keep", "eval_interval",
                "eval_before_train", "eval_batch_size", "dump_data_batch", "dump_eval_results",
                "print_example_interval", "num_logger_eval_samples", "num_logger_train_samples",
                "enable_ray_gpu_monitor", "placement"),
    "data": ("train_data", "val_data", "dataloader"),
}  # fmt: skip


@cache
def _folder_digest(folder: Path, patterns: tuple[str, ...]) -> str:
    """Digest over the names and contents of matching files; cached, since weights are read once for it."""
    names = sorted({file.name for pattern in patterns for file in folder.glob(pattern)})
    return digest(canonical_json({name: digest((folder / name).read_bytes()) for name in names}))


def local_model(path: str, key: str) -> Path:
    """The folder of a model that must already be on this machine.

    Raises:
        ConfigError: there is no such folder, or it holds no config.json.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: no model at {path} (no config.json); models are not downloaded at run time")
    return folder


def frozen_models(cfg: Any) -> dict[str, dict[str, str]]:
    """{role: {path, digest}} of every model that SkyRL loads at start."""
    roles = {"policy": cfg.trainer.policy.model.path}
    if cfg.trainer.critic.model.path:
        roles["critic"] = cfg.trainer.critic.model.path
    if uses_reference(cfg):
        roles["ref"] = cfg.trainer.ref.model.path
    folders = {role: local_model(path, f"trainer.{role}.model.path") for role, path in roles.items()}
    return {role: {"path": str(f), "digest": _folder_digest(f, WEIGHTS)} for role, f in folders.items()}


def uses_reference(cfg: Any) -> bool:
    return bool(cfg.trainer.algorithm.use_kl_loss or cfg.trainer.algorithm.use_kl_in_reward)


def tokenizer_digest(cfg: Any) -> str:
    return _folder_digest(local_model(cfg.trainer.policy.model.path, "trainer.policy.model.path"), TOKENIZER)


def config_digest(cfg: Any) -> str:
    """Digest of SkyRL's configuration without what names places or logging; models and data have their own digests."""
    plain = get_config_as_dict(cfg)
    for section, keys in LOCATION_KEYS.items():
        for key in keys:
            plain[section].pop(key, None)
    for role in ("policy", "critic", "ref"):
        path = plain["trainer"][role]["model"].pop("path", None)
        plain["trainer"][role]["model"]["present"] = bool(path)
    plain["trainer"]["policy"]["model"]["lora"].pop("lora_sync_path", None)
    engine = plain["generator"]["inference_engine"]
    for key in ("external_server_urls", "external_proxy_url", "served_model_name"):
        engine.pop(key, None)
    return digest(canonical_json(plain))
