"""m200, the default model of the benchmarks: a Llama of 190 million parameters with random
weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from kvrelay.bench.shapes import NAMED
from kvrelay.process.owned_folder import OwnedFolder

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
        # The checkpoint is written to another folder and renamed, so it is always complete.
        with OwnedFolder("model", folder.parent) as aside:
            write_model(aside.path / NAME, _CONFIG)
            try:
                (aside.path / NAME).rename(folder)
            except OSError:
                # Another process may have written the same meanwhile.
                if not folder.exists():
                    raise
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
