"""Which files of a model's folder decide what it answers, and hashes of them.

The hashes are XXH3 with 128 bits. They tell apart what an operator puts there: a fine-tune, another
revision, a shard that was not copied to its end. They do not stop somebody who makes two files with
one hash on purpose; whoever can write to a model's folder can change the answers anyway.
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
    """Hash of the files that give token ids their texts; empty where there are none, or they cannot
    be read.

    A router that tokenizes with other files than those of a worker's model would ask it for
    nonsense.
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
