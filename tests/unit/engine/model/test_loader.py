from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.tiny_models import EOS, MAX_LEN, VOCAB, build
from transformers import AutoModelForCausalLM

from kvrelay.engine.model.loader import load_model, weight_bytes
from kvrelay.errors import ModelRefused


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the tiny llama, to spoil."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def shard(folder: Path) -> list[str]:
    """Saves the model again in several files; returns their names."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_what_is_loaded(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.dtype == loaded.kv_dtype == "float32"
    assert loaded.eos_token_ids == {EOS}
    assert loaded.max_model_len == MAX_LEN
    assert loaded.vocab_size == VOCAB
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_tied_weights_are_held_and_counted_once(tmp_path: Path) -> None:
    apart = load_model(str(build("llama", tmp_path / "apart", tie_word_embeddings=False)))
    tied = load_model(str(build("llama", tmp_path / "tied", tie_word_embeddings=True)))
    embedding = tied.model.get_input_embeddings().weight
    assert tied.model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    assert weight_bytes(apart.model) - weight_bytes(tied.model) == embedding.numel() * 4


def test_eos_ids_come_from_the_generation_config(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 6])
    assert load_model(str(folder)).eos_token_ids == {5, 6}
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder)).eos_token_ids == {EOS}


def test_longrope_ends_where_its_frequencies_change(tmp_path: Path) -> None:
    factors = [1.0] * 6
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    path = build("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    assert load_model(str(path)).max_model_len == 64


class TestModelId:
    def test_the_same_for_copies_and_dtypes(
        self, folder: Path, tiny_model: Callable[..., Path]
    ) -> None:
        assert (
            load_model(str(folder)).model_id
            == load_model(str(tiny_model()), dtype="bfloat16").model_id
        )

    def test_another_for_other_weights_of_the_same_shapes(
        self, folder: Path, tiny_model: Callable[..., Path]
    ) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.self_attn.q_proj.weight"] *= 1.001
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert load_model(str(folder)).model_id != load_model(str(tiny_model())).model_id

    def test_another_for_another_configuration(
        self, folder: Path, tiny_model: Callable[..., Path]
    ) -> None:
        edit(folder / "config.json", rms_norm_eps=1e-3)
        assert load_model(str(folder)).model_id != load_model(str(tiny_model())).model_id


def test_shards(folder: Path) -> None:
    expected = load_model(str(folder)).model.state_dict()
    assert len(shard(folder)) > 2
    found = load_model(str(folder)).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_in_the_hubs_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot links to files elsewhere in the repository's cache; weights in one file and in
    shards.
    """
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in ("whole", "sharded"):
        if name == "sharded":
            shard(folder)
        repository = cache / f"models--someone--{name}"
        snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
        for path in (snapshot, blobs, repository / "refs"):
            path.mkdir(parents=True)
        (repository / "refs" / "main").write_text("0123abcd")
        for file in folder.iterdir():
            shutil.copy(file, blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
        assert load_model(f"someone/{name}").vocab_size == VOCAB
    with pytest.raises(
        ModelRefused,
        match="someone/nothing': the folder does not exist, and the model is not in",
    ):
        load_model("someone/nothing")


# What is refused


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json: cannot be read"


def config_is_not_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json:1: not valid JSON"


def config_is_nested_too_deep(folder: Path) -> str:
    (folder / "config.json").write_text("[" * 10**5)
    return "config.json:1: not valid JSON"


def config_is_a_list(folder: Path) -> str:
    (folder / "config.json").write_text("[]")
    return "config.json: the content is not a JSON object"


def unknown_architecture(folder: Path) -> str:
    edit(folder / "config.json", model_type="nonesuch")
    return "transformers cannot load it: .*nonesuch"


def own_code(folder: Path) -> str:
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    return "auto_map requires code"


def encoder_decoder(folder: Path) -> str:
    edit(folder / "config.json", is_encoder_decoder=True)
    return "encoder-decoder"


def weights_by_another_name(folder: Path) -> str:
    edit(folder / "config.json", transformers_weights="../other.safetensors")
    return "transformers_weights names other weight files"


def an_adapter(folder: Path) -> str:
    (folder / "adapter_config.json").write_text("{}")
    return "adapters are not supported"


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "model.safetensors and model.safetensors.index.json are missing; found no weights"


def truncated_weights(folder: Path) -> str:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    return "invalid safetensors file"


def absurd_header(folder: Path) -> str:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + data[8:])
    return "invalid safetensors file"


def a_header_that_the_reason_would_repeat(folder: Path) -> str:
    header = json.dumps({"a": "x" * 20_000}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return "invalid safetensors file"


def overlapping_tensors(folder: Path) -> str:
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]}
            for name, start in (("a", 0), ("b", 4))
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    return "invalid safetensors file"


def a_tensor_is_missing(folder: Path) -> str:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return (
        "1 weights are missing or have the wrong shape; the first: model.layers.1.self_attn.q_proj"
    )


def a_tensor_has_another_shape(folder: Path) -> str:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(VOCAB, 7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return r"1 weights .* lm_head.weight is torch.Size\(\[128, 7\]\), not torch.Size\(\[128, 48\]\)"


def an_end_that_is_no_token(folder: Path) -> str:
    edit(folder / "generation_config.json", eos_token_id=[1, 0.5])
    return "eos_token_id .* is neither a token id nor a list"


def absurd_vocabulary(folder: Path) -> str:
    edit(folder / "config.json", vocab_size=10**9)
    return "the configuration requires [0-9]* weights, and the files contain [0-9]*"


def absurdly_many_layers(folder: Path) -> str:
    edit(folder / "config.json", num_hidden_layers=2**62)
    return "4611686018427387904 layers, and the weights have [0-9]* tensors"


def a_shard_is_missing(folder: Path) -> str:
    names = shard(folder)
    (folder / names[1]).unlink()
    return f"1 of {len(names)} weight files are missing: {names[1]}"


def a_shard_lies_elsewhere(folder: Path) -> str:
    shard(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "'../model.safetensors' is not the name of a safetensors file in this folder"


def index_without_a_map(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    return "weight_map, from tensor names to file names, is missing"


def link_out_of_the_folder(folder: Path) -> str:
    target = folder.parent / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(target)
    (folder / "model.safetensors").symlink_to(target)
    return "model.safetensors: the link points outside"


@pytest.mark.parametrize(
    "spoil",
    [
        no_config,
        config_is_not_json,
        config_is_nested_too_deep,
        config_is_a_list,
        unknown_architecture,
        own_code,
        encoder_decoder,
        weights_by_another_name,
        an_adapter,
        no_weights,
        truncated_weights,
        absurd_header,
        a_header_that_the_reason_would_repeat,
        overlapping_tensors,
        a_tensor_is_missing,
        a_tensor_has_another_shape,
        an_end_that_is_no_token,
        absurd_vocabulary,
        absurdly_many_layers,
        a_shard_is_missing,
        a_shard_lies_elsewhere,
        index_without_a_map,
        link_out_of_the_folder,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_spoiled_folders_are_refused(folder: Path, spoil: Callable[[Path], str]) -> None:
    reason = spoil(folder)
    with pytest.raises(ModelRefused, match=reason) as refused:
        load_model(str(folder))
    assert len(str(refused.value)) < 2000


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_and_never_opened(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (folder / name).write_bytes(pickle.dumps(Canary(tmp_path / "sang")))
    load_model(str(folder))  # sound weights beside it
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=f"found only {name}, and pickled weights can run code"):
        load_model(str(folder))
    assert not (tmp_path / "sang").exists()


_MAMBA = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": 12,
    "num_heads": 8,
    "n_groups": 1,
}


@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [
        ("qwen3_next", {}, "keeps a state that is not a KV cache"),
        ("mamba2", _MAMBA, "keeps a state"),
        ("recurrent_gemma", {}, "keeps a state that is not a KV cache"),
        ("minimax", {}, r"1 of 2 layers have no KV cache of their own \(layers 1\)"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"]},
            r"1 of 2 layers have no KV cache of their own "
            r".*\(layers 0\)",
        ),
        (
            "llama4_text",
            {"attention_chunk_size": 16, "num_experts_per_tok": 1},
            "mask is neither causal nor a sliding",
        ),
        ("bert", {"is_decoder": False}, "mask is neither causal nor a sliding window"),
        ("doge", {}, "passes its own attention mask"),
        ("deepseek_v32", {}, "attention with indices is not supported"),
    ],
)
def test_architectures_that_would_run_wrong_are_refused(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], reason: str
) -> None:
    path = build(architecture, tmp_path, **overrides)
    with pytest.raises(ModelRefused, match=reason):
        load_model(str(path))
