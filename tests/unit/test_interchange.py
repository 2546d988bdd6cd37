"""Stock SkyRL checkpoints in, Hugging Face, PEFT and Orbax out: the bits are the same, and nothing foreign is executed.

Two ranks under SkyRL's own FSDPStrategy save the stock way (`stock_ranks.py`); what our capture says they held is the
reference for the import. As SkyRL does, they trained the tied embedding and head of the full model apart.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn

from checkpointing.commit import commit, start_attempt
from checkpointing.errors import CheckpointError, CorruptBlob, MissingEntry, TopologyMismatch
from checkpointing.history import newest_restorable
from checkpointing.manifest import Manifest, Shard
from checkpointing.store import Store
from checkpointing.tensors import tensor_digest
from trainer.captured import Captured
from trainer.data import EpochLoader
from trainer.interchange import stock, whole
from trainer.interchange.huggingface import export_huggingface
from trainer.interchange.orbax import export_orbax
from trainer.interchange.stock import Imported, import_stock
from trainer.interchange.whole import read_whole
from trainer.interchange.write import write_manifest
from trainer.shards import digest_shard

PROMPTS = 18
POLICY = ["policy/parameters", "policy/optimizer", "policy/lr_scheduler", "policy/rng"]


def _make_base(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trainer.maze.base_model import make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 1,  # odd: the ranks hold pieces of different sizes
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rank_main(rank: int, folder: Path) -> None:
    from tests.unit.stock_ranks import main  # here: importing it makes this process one without CUDA

    main(rank, folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """`base/`, and for `lora` and `full` each `global_step_5/` and what the ranks captured, `<rank>-<entry>.json`."""
    folder: Path = tmp_path_factory.mktemp("stock")
    _make_base(folder / "base")
    spawn(_rank_main, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
    return folder


@pytest.fixture(scope="module", params=["lora", "full"])
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def imported(saved: Path, kind: str) -> Imported:
    return import_stock(saved / kind / "global_step_5", PROMPTS)


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def _written(store: Store, imported: Imported) -> Manifest:
    return write_manifest(store, imported.step, imported.entries, {"policy": 2, "ref": 2}, {"config": "c"})


def test_an_import_is_what_the_ranks_would_have_captured(saved: Path, kind: str, imported: Imported) -> None:
    for name in POLICY:
        for rank, captured in enumerate(imported.entries[name]):
            file = saved / kind / f"{rank}-{name.replace('/', '-')}.json"
            held = Shard.model_validate_json(file.read_text())
            got = digest_shard(captured, rank)
            assert (got.data, got.tensor_digests) == (held.data, held.tensor_digests), f"{name} of rank {rank}"
    names = imported.entries["policy/parameters"][0].tensors
    assert all(("base_model.model." in name and "lora_" in name) == (kind == "lora") for name in names)
    assert imported.step == 5
    assert imported.entries["driver/global_step"][0].data == {"global_step": 5}
    assert imported.config["trainer"]["policy"]["model"]["path"] == str(saved / "base")


def test_an_import_becomes_the_first_commit_of_a_run(store: Store, imported: Imported) -> None:
    manifest = _written(store, imported)
    first = commit(store, start_attempt(store, None), manifest, None)
    assert newest_restorable(store)[0] == (first, manifest)
    assert {
        f"driver/{name}" for name in ("global_step", "data_position", "dynamic_sampling")
    } <= manifest.entries.keys()


class _Prompts(list[int]):
    def collate_fn(self, items: list[int]) -> list[int]:
        return items


def test_the_position_after_any_step_is_the_one_of_our_loader() -> None:
    trainer = {"train_batch_size": 4, "algorithm": {"dynamic_sampling": {"type": None}}}
    loader, step = EpochLoader(_Prompts(range(PROMPTS)), 4, 3, seed=1), 0
    assert stock._position(0, PROMPTS, trainer) == loader.position()
    for _ in range(3):
        for _batch in loader:
            step += 1
            assert stock._position(step, PROMPTS, trainer) == loader.position()
    assert step == 12
    with pytest.raises(CheckpointError, match="less than one batch"):
        stock._position(1, 3, trainer)
    with pytest.raises(CheckpointError, match="dynamic sampling"):
        stock._position(1, PROMPTS, trainer | {"algorithm": {"dynamic_sampling": {"type": "filter"}}})


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch '{self.marker}'",)


FILES = [
    "trainer_state.pt",
    "policy/model_world_size_2_rank_1.pt",
    "policy/optim_world_size_2_rank_0.pt",
    "policy/extra_state_world_size_2_rank_1.pt",
]


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A stock checkpoint to spoil."""
    return Path(shutil.copytree(saved / "full" / "global_step_5", tmp_path / "global_step_5"))


@pytest.mark.parametrize("file", FILES)
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(copy: Path, tmp_path: Path, file: str) -> None:
    marker = tmp_path / "executed"
    torch.save({"global_step": 5, "config": _Evil(marker)}, copy / file)  # noqa: TID251
    with pytest.raises(CheckpointError, match="refused"):
        import_stock(copy, PROMPTS)
    assert not marker.exists()
    torch.load(copy / file, weights_only=False)  # noqa: TID251
    assert marker.exists(), "the bait must bite where it is let in"


def test_the_loader_state_of_stock_is_never_opened(copy: Path) -> None:
    (copy / "data.pt").write_bytes(b"anything")
    import_stock(copy, PROMPTS)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_and_a_damaged_one_are_named(copy: Path, file: str) -> None:
    whole_file = (copy / file).read_bytes()
    (copy / file).write_bytes(whole_file[:-100])
    with pytest.raises(CheckpointError, match=Path(file).name):
        import_stock(copy, PROMPTS)
    (copy / file).unlink()
    with pytest.raises(TopologyMismatch if "model" in file else MissingEntry):
        import_stock(copy, PROMPTS)


def _resave(file: Path, change: Any) -> None:
    held = stock._load(file)
    change(held)
    torch.save(held, file.with_suffix(".new"))  # noqa: TID251
    file.with_suffix(".new").replace(file)  # the old file is mapped by what was read from it


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (FILES[0], lambda held: held.update(global_step=6), "step 6"),
        (FILES[0], lambda held: held.pop("config"), "config"),
        (FILES[2], lambda held: held["param_groups"][0]["params"].pop(), "tied"),
        (FILES[2], lambda held: held.update(state={0: {"step": 3}}), "rank 0"),
        (FILES[3], lambda held: held.update(rank=0), "rank 0 of 2"),
        (FILES[3], lambda held: held.pop("rng"), "rng"),
    ],
)
def test_files_that_contradict_each_other_are_refused(copy: Path, file: str, change: Any, message: str) -> None:
    _resave(copy / file, change)
    with pytest.raises(CheckpointError, match=message):
        import_stock(copy, PROMPTS)


def test_a_piece_of_another_size_than_its_placement_is_refused(copy: Path) -> None:
    def shrink(held: Any) -> None:
        held["model.norm.weight"]._local_tensor = torch.zeros(3)

    _resave(copy / FILES[1], shrink)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        import_stock(copy, PROMPTS)


def test_an_export_loads_bit_for_bit_where_it_is_meant_to(
    saved: Path, kind: str, imported: Imported, store: Store, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest, out = _written(store, imported), tmp_path / "exports" / "hf"
    export_huggingface(store, manifest, imported.config, out)
    trained = _bits(read_whole(store, manifest, "policy/parameters"))
    if kind == "lora":
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved / "base"), out)
        loaded = {name: p for name, p in model.named_parameters() if "lora_" in name}
        stock_adapter = load_file(
            saved / "lora" / "global_step_5" / "policy" / "lora_adapter" / "adapter_model.safetensors"
        )
        assert _bits(load_file(out / "adapter_model.safetensors")) == _bits(stock_adapter)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
        assert trained["lm_head.weight"] != trained["model.embed_tokens.weight"], "SkyRL trains them apart"
    assert _bits(loaded) == trained
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(saved / "base").get_vocab()
    assert [path.name for path in out.parent.iterdir()] == ["hf"], "nothing hidden is left"
    with pytest.raises(CheckpointError, match="exists"):
        export_huggingface(store, manifest, imported.config, out)


def _config(base: Path, **lora: Any) -> dict[str, Any]:
    settings = {"rank": 0, "alpha": 1, "dropout": 0.0, "init_method": "kaiming", "target_modules": "all-linear"}
    return {"trainer": {"policy": {"model": {"path": str(base), "lora": settings | {"exclude_modules": None} | lora}}}}


def _one_rank(store: Store, tensors: dict[str, torch.Tensor]) -> Manifest:
    shards = {name: {"shape": list(t.shape), "offset": [0] * t.ndim} for name, t in tensors.items()}
    parameters = [Captured(tensors, {"shards": shards})]
    return write_manifest(store, 1, {"policy/parameters": parameters}, {"policy": 1}, {})


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("base")
    _make_base(folder)
    return folder


def test_tied_weights_that_stayed_equal_stay_tied(base: Path, store: Store, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tensors = load_file(base / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].clone()
    for name, given in {"once": tensors, "twice": tensors | {"lm_head.weight": embedding}}.items():
        export_huggingface(store, _one_rank(store, given), _config(base), tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.tie_word_embeddings
        assert _bits({name: model.state_dict()[name] for name in given}) == _bits(given)


def test_a_checkpoint_of_another_model_is_not_exported(base: Path, store: Store, tmp_path: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    lost = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    for given, config, message in [
        (lost, _config(base), r"model\.norm\.weight"),
        (tensors | {"more": torch.zeros(1)}, _config(base), "more"),
        (tensors, _config(base, rank=3), "no LoRA weights"),
        (tensors, _config(base, rank=3, init_method="pissa"), "pissa"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            export_huggingface(store, _one_rank(store, given), config, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_export_that_breaks_off_leaves_nothing(
    base: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(path: Path) -> None:
        assert not (tmp_path / "exports" / "out").exists(), "it must be durable before it has its name"
        raise KeyboardInterrupt

    monkeypatch.setattr(whole, "_fsync_file", power_cut)
    manifest = _one_rank(store, load_file(base / "model.safetensors"))
    with pytest.raises(KeyboardInterrupt):
        export_huggingface(store, manifest, _config(base), tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []


def _torch_bits(array: Any) -> str:
    """Digest of what Orbax returns, made without the view trick of the export."""
    if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
        return tensor_digest(raw.view(getattr(torch, array.dtype.name)).reshape(array.shape))
    return tensor_digest(torch.from_numpy(np.array(array)))


def _read_orbax(folder: Path) -> Any:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = ocp.args.Composite(state=ocp.args.PyTreeRestore(), metadata=ocp.args.JsonRestore())
        return checkpointer.restore(folder, args=items)


def test_orbax_reads_the_whole_state_back_bit_for_bit(imported: Imported, store: Store, tmp_path: Path) -> None:
    manifest = _written(store, imported)
    export_orbax(store, manifest, tmp_path / "orbax")
    read = _read_orbax(tmp_path / "orbax")
    for name in ("policy/parameters", "policy/optimizer"):
        got = {tensor: _torch_bits(array) for tensor, array in read.state[name].items()}
        assert got == _bits(read_whole(store, manifest, name))
    for rank, captured in enumerate(imported.entries["policy/rng"]):
        got = {tensor: _torch_bits(array) for tensor, array in read.state["policy/rng"][str(rank)].items()}
        assert got == _bits(captured.tensors)
        assert read.metadata["entries"]["policy/rng"][rank] == captured.data
    assert read.metadata["step"] == 5
    assert read.metadata["entries"]["driver/data_position"][0]["epoch"] == 1
    assert read.metadata["entries"]["policy/optimizer"][0]["groups"][0]["lr"] == 1e-6
    with pytest.raises(CheckpointError, match="exists"):
        export_orbax(store, manifest, tmp_path / "orbax")


def test_orbax_keeps_every_dtype_and_every_bit(store: Store, tmp_path: Path) -> None:
    every_bit = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    tensors = {
        "bf16": every_bit.view(torch.bfloat16).reshape(256, 256),  # NaN payloads and both zeros included
        "f16": every_bit.view(torch.float16),
        "fp8": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
        "f64": torch.tensor(0.1, dtype=torch.float64),
    }
    export_orbax(store, _one_rank(store, tensors), tmp_path / "orbax")
    read = _read_orbax(tmp_path / "orbax").state["policy/parameters"]
    assert {name: _torch_bits(array) for name, array in read.items()} == _bits(tensors)


def test_what_can_t_be_gathered_is_an_error(store: Store, imported: Imported) -> None:
    manifest = _written(store, imported)
    with pytest.raises(MissingEntry, match="critic/parameters"):
        read_whole(store, manifest, "critic/parameters")
    with pytest.raises(CheckpointError, match="each rank has its own"):
        read_whole(store, manifest, "policy/rng")
    halves = imported.entries["policy/parameters"]
    holed = write_manifest(store, 5, {"policy/parameters": halves[:1]}, {"policy": 1}, {})
    with pytest.raises(CheckpointError, match=r"policy/parameters: .*cover"):
        read_whole(store, holed, "policy/parameters")
    blob = manifest.entries["policy/parameters"].shards[1].tensors
    assert blob is not None
    store.delete(blob.key)
    with pytest.raises(CorruptBlob, match=blob.digest):
        read_whole(store, manifest, "policy/parameters")
