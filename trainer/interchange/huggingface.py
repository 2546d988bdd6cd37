"""A checkpoint as a folder that Hugging Face's own loaders read, bit for bit.

With LoRA a PEFT adapter, whose files leave the adapter's name out: `...q_proj.lora_A.default.weight` is
`...q_proj.lora_A.weight` there. Without LoRA a model: parameters have its own names already. The tokenizer is copied
from the base model. Optimizer, RNG streams and position do not go into such a folder.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from checkpointing.errors import CheckpointError
from checkpointing.manifest import Manifest
from checkpointing.store import Store
from checkpointing.tensors import pack_tensors, tensor_digest
from trainer.identity import TOKENIZER, local_model
from trainer.interchange.whole import new_folder, read_whole

COPIED = (*TOKENIZER, "generation_config.json")

UNCHANGED_BASE = ("kaiming", "gaussian", "orthogonal")
"""How an adapter may begin so that base model plus adapter is the trained model. Others rewrite the base weights."""


def export_huggingface(store: Store, manifest: Manifest, config: dict[str, Any], out: Path) -> None:
    """Write the policy to the new folder `out`, which appears whole or not at all.

    Args:
        store: of the run.
        manifest: of the checkpoint.
        config: SkyRL's, as nested dicts; names the base model, which must be on this machine, and the LoRA settings.
        out: a LoRA run's is for `peft.PeftModel.from_pretrained(base, out)`, any other's for
            `transformers.AutoModelForCausalLM.from_pretrained(out)`.

    Raises:
        CheckpointError: `out` exists, or the checkpoint is not one of this model.
        ConfigError: the base model is not there.
        CorruptBlob: a blob is missing or damaged.
    """
    settings = config["trainer"]["policy"]["model"]
    base = local_model(settings["path"], "trainer.policy.model.path")
    tensors = read_whole(store, manifest, "policy/parameters")
    lora = settings["lora"]
    adapter = _adapter(tensors, lora) if lora["rank"] > 0 else {}
    described = _lora_config(lora, base) if adapter else _model(tensors, base)
    with new_folder(out) as folder:
        described.save_pretrained(folder)
        if adapter:
            (folder / "adapter_model.safetensors").write_bytes(pack_tensors(adapter))
        for file in {found for pattern in COPIED for found in base.glob(pattern)}:
            shutil.copyfile(file, folder / file.name)


def _adapter(tensors: dict[str, torch.Tensor], lora: dict[str, Any]) -> dict[str, torch.Tensor]:
    if lora["init_method"] not in UNCHANGED_BASE:
        raise CheckpointError(f"lora.init_method={lora['init_method']} rewrites the base model: no adapter of it alone")
    adapter = {name.replace(".default", ""): tensor for name, tensor in tensors.items() if ".lora_" in name}
    if not adapter:
        raise CheckpointError("policy/parameters: no LoRA weights in it, though the config says lora.rank > 0")
    return adapter


def _lora_config(lora: dict[str, Any], base: Path) -> Any:
    from peft import LoraConfig, TaskType

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=str(base),
        inference_mode=True,
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        lora_dropout=lora["dropout"],
        target_modules=lora["target_modules"],
        exclude_modules=lora["exclude_modules"],
        bias="none",
    )


def _model(tensors: dict[str, torch.Tensor], base: Path) -> Any:
    """transformers' own model around the tensors: it knows names and layouts of its files, and splits large ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if _trained_apart(tensors, model):
            config.tie_word_embeddings = False
            model = AutoModelForCausalLM.from_config(config)
    unexpected = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unexpected or empty:
        name = [*unexpected, *empty][0]
        raise CheckpointError(f"policy/parameters: the checkpoint and the model at {base} disagree about {name}")
    return model


def _trained_apart(tensors: dict[str, torch.Tensor], model: Any) -> bool:
    """Whether weights that the base model ties have become different: SkyRL 0.4.0 shards, and so trains, them apart."""
    tied = (model._tied_weights_keys or {}).items() if model.config.tie_word_embeddings else ()
    pairs = [(tensors[one], tensors[other]) for one, other in tied if one in tensors and other in tensors]
    return any(tensor_digest(one) != tensor_digest(other) for one, other in pairs)
