"""Writes m200 with the tokenizer of the bundled model, for tools that build prompts from real
words: `text_model.py FOLDER`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from transformers import LlamaConfig

from kvrelay.bench.reference_model import write_model
from kvrelay.bench.shapes import NAMED
from kvrelay.models import resolve_model

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_text_model(folder: Path) -> Path:
    """Writes the model to `folder`, and returns that."""
    demo = Path(resolve_model("demo"))
    words = LlamaConfig.from_pretrained(demo)
    shape = NAMED["m200"].to_dict()
    ids = {
        name: getattr(words, name)
        for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    write_model(folder, LlamaConfig(**(shape | ids)))
    for name in TEXT_FILES:
        shutil.copy(demo / name, folder / name)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: text_model.py FOLDER")
    write_text_model(Path(sys.argv[1]))
