"""m200, the default model of the benchmarks: a Llama of 190 million parameters with random
weights.
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
from transformers.utils.logging import disable_progress_bar

from kvrelay.bench.shapes import NAMED

NAME = "m200"
_CONFIG = NAMED[NAME]


def reference_model() -> Path:
    """Returns the folder of the bfloat16 checkpoint (0.36 GiB). The first call writes it to the
    user's cache folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kvrelay" / NAME
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The checkpoint is written to a temporary folder and renamed. So the folder is always
        # complete, and if two processes write at once, one of them wins.
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            write_model(Path(aside) / NAME, _CONFIG)
            (Path(aside) / NAME).rename(folder)
    return folder


def write_model(folder: Path, config: LlamaConfig) -> None:
    """Writes weights from a fixed seed, and a tokenizer with one word per token id: t0, t1, ..."""
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"t{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t0", eos_token="t1", unk_token="t0"
    ).save_pretrained(folder)
