"""Model folders: configuration, headers of weights, index of shards, tokenizer, chat template."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fuzz.parser import Feed, Parser, refusal
from fuzz.spoil import garbled, json_bytes, spoiled, text
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from kvrelay.config.model_sections import ModelConfig
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.engine.model.loader import load_model
from kvrelay.errors import DeadlineExceeded, InvalidArgument, ModelRefused, NotFound
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.tokenizer.tokenizer import TextStream, Tokenizer
from kvrelay.types.chat import ChatMessage
from router.frontend.model_card import ModelCard

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 16,
    "dtype": "float32",
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_GENERATION = {"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.5}
_TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": "{{ messages[0].content }}",
}
_TEMPLATE = (
    "{% for one in messages %}<|{{ one.role }}|>{{ one.content }}{% endfor %}{{ bos_token }}"
)
_SHAPES = {
    "model.embed_tokens.weight": [128, 16],
    "model.layers.0.self_attn.q_proj.weight": [16, 16],
    "model.layers.0.self_attn.k_proj.weight": [8, 16],
    "model.layers.0.self_attn.v_proj.weight": [8, 16],
    "model.layers.0.self_attn.o_proj.weight": [16, 16],
    "model.layers.0.mlp.gate_proj.weight": [16, 16],
    "model.layers.0.mlp.up_proj.weight": [16, 16],
    "model.layers.0.mlp.down_proj.weight": [16, 16],
    "model.layers.0.input_layernorm.weight": [16],
    "model.layers.0.post_attention_layernorm.weight": [16],
    "model.norm.weight": [16],
}
_INDEX = {
    "metadata": {"total_size": 1},
    "weight_map": dict.fromkeys(_SHAPES, "model-00001-of-00001.safetensors"),
}
_CONFIG_WORDS = (
    *(
        "auto_map",
        "transformers_weights",
        "is_encoder_decoder",
        "quantization_config",
        "text_config",
        "sliding_window",
    ),
    *(
        "layer_types",
        "rope_scaling",
        "torch_dtype",
        "bert",
        "mamba2",
        "gpt2",
        "qwen3_moe",
        "num_experts",
        "attn_implementation",
    ),
    *(
        "longrope",
        "yarn",
        "original_max_position_embeddings",
        "_attn_implementation",
        "trust_remote_code",
        "peft",
    ),
)


@cache
def _header() -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in _SHAPES.items():
        size = 4
        for one in shape:
            size *= one
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header


_DATA = bytes(4 * (128 * 16 + 7 * 16 * 16 - 2 * 8 * 16 + 3 * 16))  # of _SHAPES, in float32


def _safetensors(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@cache
def _tokenizer() -> str:
    made = Backend(models.BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4, "Ġ": 5}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made.to_str()


_FILES = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "model.safetensors",
    ),
    *("model.safetensors.index.json", "chat_template.jinja"),
)


def _good(name: str) -> bytes:
    match name:
        case "config.json":
            return json.dumps(_CONFIG).encode()
        case "generation_config.json":
            return json.dumps(_GENERATION).encode()
        case "tokenizer_config.json":
            return json.dumps(_TOKENIZER_CONFIG).encode()
        case "tokenizer.json":
            return _tokenizer().encode()
        case "model.safetensors":
            return _safetensors(json.dumps(_header()).encode(), _DATA)
        case "chat_template.jinja":
            return _TEMPLATE.encode()
    return json.dumps(_INDEX).encode()


def _spoiled(draw: random.Random, name: str) -> bytes:
    match name:
        case "config.json":
            return json_bytes(draw, spoiled(draw, _CONFIG, _CONFIG_WORDS))
        case "generation_config.json":
            return json_bytes(draw, spoiled(draw, _GENERATION))
        case "tokenizer_config.json":
            return json_bytes(draw, spoiled(draw, _TOKENIZER_CONFIG))
        case "tokenizer.json":
            return json_bytes(draw, spoiled(draw, json.loads(_tokenizer())))
        case "model.safetensors":
            header = json_bytes(
                draw, spoiled(draw, _header(), ["F64", "BF16", "I8", "F4", "__metadata__"])
            )
            whole = _safetensors(header, draw.choice([b"", _DATA, _DATA, _DATA, _DATA + bytes(8)]))
            if draw.random() < 0.1:
                whole = (
                    struct.pack("<Q", draw.choice([0, 1, 2**31, 2**63, 2**64 - 1, len(header) + 1]))
                    + whole[8:]
                )
            return garbled(draw, whole) if draw.random() < 0.2 else whole
        case "chat_template.jinja":
            return text(
                draw, _TEMPLATE, ["{{", "}}", "{%", "%}", "|", "(", "[0]", "endfor", "range(9)"]
            ).encode(errors="replace")
    return json_bytes(
        draw, spoiled(draw, _INDEX, ["../x.safetensors", "model.safetensors", "/etc/passwd"])
    )


def folder_file(draw: random.Random) -> bytes:
    """Begins with the number of the file that is spoiled."""
    number = draw.randrange(len(_FILES))
    return bytes([number]) + _spoiled(draw, _FILES[number])


class Folder:
    """One file of it is another than it should be; the others are good."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in _FILES:
            self.reset(name)

    def reset(self, name: str) -> None:
        if name == "model.safetensors.index.json":
            (self.path / name).unlink(missing_ok=True)
            (self.path / "model-00001-of-00001.safetensors").unlink(missing_ok=True)
            (self.path / "model.safetensors").write_bytes(_good("model.safetensors"))
        else:
            (self.path / name).write_bytes(_good(name))

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)
        if name == "model.safetensors.index.json":
            (self.path / "model.safetensors").rename(self.path / "model-00001-of-00001.safetensors")


@contextmanager
def describing() -> Iterator[Feed]:
    """As a router reads a folder, and as a worker looks at it before it loads anything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name))

        def feed(data: bytes) -> str:
            file = _FILES[data[0]]
            folder.put(file, data[1:])
            refused = []
            for read in (_card, _text, _template, _weights):
                try:
                    read(folder.path)
                except (ModelRefused, NotFound) as error:
                    refusal(error.message)
                    refused.append(read.__name__)
            folder.reset(file)
            return f"refused by {' '.join(refused)}" if refused else "taken"

        yield feed


def _card(folder: Path) -> None:
    card = ModelCard.load(str(folder), ModelConfig())
    assert card.info.max_model_len > 0
    assert card.vocab_size > 0
    assert all(isinstance(one, int) for one in card.eos_token_ids)


def _text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("ab a\U0001f600")
    tokenizer.decode(ids)
    stream = TextStream(tokenizer, ["x"], ids)
    for one in [*ids, 0, 5, 100_000]:
        stream.push(one)
    stream.finish()


def _template(folder: Path) -> None:
    ChatTemplate.load(folder)


def _weights(folder: Path) -> None:
    checkpoint = find_checkpoint(str(folder))
    checkpoint.model_id, checkpoint.sampled_model_id  # noqa: B018 - they are computed


def loaded_file(draw: random.Random) -> bytes:
    number = draw.choices(range(len(_FILES)), [6, 2, 0, 0, 4, 1, 0])[0]
    return bytes([number]) + _spoiled(draw, _FILES[number])


@contextmanager
def loading() -> Iterator[Feed]:
    """As a worker loads it."""
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name))

        def feed(data: bytes) -> str:
            file = _FILES[data[0]]
            folder.put(file, data[1:])
            try:
                load_model(str(folder.path))
            except ModelRefused:
                return "refused"
            finally:
                folder.reset(file)
            return "taken"

        yield feed


def template(draw: random.Random) -> bytes:
    return _spoiled(draw, "chat_template.jinja")


@contextmanager
def rendering() -> Iterator[Feed]:
    with asyncio.Runner() as runner:

        def feed(data: bytes) -> str:
            return runner.run(_render(data.decode()))

        async def _render(source: str) -> str:
            chat._template = source
            try:
                await chat.render(
                    (ChatMessage("user", "hello"), ChatMessage("assistant", "</s>")), cpu_s=0.5
                )
            except (InvalidArgument, DeadlineExceeded) as error:
                return f"{refusal(error.message)}, {type(error).__name__}"
            return "rendered"

        chat = ChatTemplate("", {"bos_token": "<s>"})
        yield feed
        runner.run(chat.aclose())


PARSERS = (
    Parser("folder", folder_file, describing, mib=128),  # a panic in Rust reads its own symbols
    Parser("load", loaded_file, loading, mib=256),
    Parser("template", template, rendering),
)
