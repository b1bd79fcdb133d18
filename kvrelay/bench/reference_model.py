"""m200: a Llama of 190 million parameters with random weights, which is what benchmarks run unless
told otherwise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvrelay.bench.shapes import NAMED

NAME = "m200"
_CONFIG = NAMED[NAME]


def reference_model() -> Path:
    """The folder of its checkpoint in bfloat16, written on first use to the user's cache folder;
    0.39 GB.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kvrelay" / NAME
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: what is there is whole, and of two that write at once one wins.
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            write_model(Path(aside) / NAME, _CONFIG)
            (Path(aside) / NAME).rename(folder)
    return folder


def write_model(folder: Path, config: LlamaConfig) -> None:
    """Writes weights from a fixed seed and a tokenizer with a word for each token id: t0, t1,
    ...
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", unk_token="t0"
    ).save_pretrained(folder)
