"""The files of a model folder that determine its answers, and their hashes.

The hashes are XXH3 with 128 bits. They distinguish the contents that operators deploy: a fine-tune,
another revision, or a shard that was not fully copied. They do not stop an attacker who constructs
two files with the same hash. An attacker who can write to the model folder can change the answers
anyway.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

VOCABULARY = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)
SETTINGS = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    *VOCABULARY,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_id(folder: Path) -> str:
    """Returns a hash of the files that map token ids to text. Empty if there are none, or if they
    cannot be read.

    A router with other tokenizer files than the worker's model would send wrong token ids.
    """
    digest = xxhash.xxh3_128()
    found = False
    try:
        for name in VOCABULARY:
            path = folder / name
            if path.is_file():
                found = True
                data = path.read_bytes()
                digest.update(f"{name} {len(data)} ".encode() + data)
    except OSError:
        return ""
    return digest.hexdigest() if found else ""
