"""The demo model as a model that thinks between two tokens of its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

from support.chat_models import THINKING, demo_with

# The tokens around its thinking.
BEGIN, END = 0, 3


def thinking_model(parent: Path) -> str:
    """The demo model with a template that thinks and a vocabulary that has its markers."""
    folder = demo_with(THINKING, parent)
    path = Path(folder) / "tokenizer.json"
    described = json.loads(path.read_text())
    for token in described["added_tokens"]:
        token["content"] = {BEGIN: "<think>", END: "</think>"}.get(token["id"], token["content"])
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {
        {BEGIN: "<think>", END: "</think>"}.get(number, spelling): number
        for spelling, number in vocabulary.items()
    }
    path.write_text(json.dumps(described))
    return folder
