"""Sizes from a model's configuration, as transformers reads it.

`python -m kvrelay.engine.model.facts FOLDER` prints them as JSON, for processes that do not import
transformers.
"""

from __future__ import annotations

import json
import sys

from transformers import AutoConfig, PretrainedConfig

from kvrelay.errors import ModelRefused


def max_model_len(config: PretrainedConfig) -> int:
    """Maximum length of a sequence in tokens.

    A LongRoPE model ends where its frequencies would change, since the stored KV would then be
    wrong. Raises ModelRefused if the configuration has no such number.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = (
        [rope]
        if "rope_type" in rope
        else [entry for entry in rope.values() if isinstance(entry, dict)]
    )
    limits = [
        entry["original_max_position_embeddings"]
        for entry in per_layer_type
        if entry.get("rope_type") == "longrope"
    ]
    limits.append(getattr(config, "max_position_embeddings", None))
    if not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise ModelRefused(
            f"{config.model_type}: max_position_embeddings is {limits[-1]}; it must be a whole "
            "number above 0"
        )
    return int(min(limits))


def main(folder: str) -> None:
    """Prints vocab_size, eos_token_id and max_position_embeddings of the model in `folder` as
    JSON. What its configuration does not name is null.
    """
    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    ).get_text_config()
    names = ("vocab_size", "eos_token_id", "max_position_embeddings")
    facts = {name: getattr(config, name, None) for name in names}
    if facts["max_position_embeddings"] is not None:
        facts["max_position_embeddings"] = max_model_len(config)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])
