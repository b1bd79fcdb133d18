"""A small model that recalls what it read among noise.

    python benchmarks/recall_model.py FOLDER [--steps N]

A text consists of facts, noise and questions. A fact is one token that stands for a key and a
value; a question is a key, and the value of the fact with this key is its answer. The model is
trained on the answers. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

BOS = 1
NUM_KEYS, NUM_VALUES = 32, 16
KEYS = range(16, 16 + NUM_KEYS)
VALUES = range(KEYS.stop, KEYS.stop + NUM_VALUES)
FACTS = range(VALUES.stop, VALUES.stop + NUM_KEYS * NUM_VALUES)
NOISE = range(FACTS.stop, FACTS.stop + 128)
LENGTH = 512
# (sequences, tokens of each, share of the steps)
COURSE = ((64, 64, 0.5), (32, 128, 0.3), (8, LENGTH, 0.2))
RATE = 2e-3
WARM_UP = 100


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, and the places of the answers."""

    tokens: list[int]
    answers: list[int]


def text(draw: random.Random, length: int, facts: float, questions: float) -> Text:
    """A text of `length` tokens. facts, questions: the probability of each at a place; the rest is
    noise.
    """
    tokens, answers, known = [BOS], [], dict[int, int]()
    unknown = draw.sample(range(NUM_KEYS), NUM_KEYS)
    while len(tokens) < length:
        chance = draw.random()
        if chance < facts and unknown:
            key = unknown.pop()
            known[key] = draw.randrange(NUM_VALUES)
            tokens.append(FACTS[key * NUM_VALUES + known[key]])
        elif facts <= chance < facts + questions and known:
            key = draw.choice(list(known))
            tokens += KEYS[key], VALUES[known[key]]
            answers.append(len(tokens) - 1)
        else:
            tokens.append(draw.choice(NOISE))
    return Text(tokens[:length], [place for place in answers if place < length])


def train(folder: Path, steps: int, seed: int = 0) -> float:
    """Trains the model and saves it. Returns the share of right answers in texts of LENGTH
    tokens.
    """
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NOISE.stop,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=16 * LENGTH,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    course = _course(steps)
    for step, (count, length) in enumerate(track(course, "Training")):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP, 2 * (1 - step / steps))
        loss = _loss(model, [text(draw, length, 0.2, 0.2) for _ in range(count)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.save_pretrained(folder)
    draw = random.Random(seed + 1)
    return accuracy(model, [text(draw, LENGTH, 0.06, 0.05) for _ in range(32)])


def _course(steps: int) -> list[tuple[int, int]]:
    return [(count, length) for count, length, share in COURSE for _ in range(int(share * steps))]


def _loss(model: LlamaForCausalLM, texts: Sequence[Text]) -> torch.Tensor:
    logits = model(torch.tensor([one.tokens for one in texts])).logits
    rows = [(n, place - 1) for n, one in enumerate(texts) for place in one.answers]
    wanted = torch.tensor([texts[n].tokens[place + 1] for n, place in rows])
    batch, places = torch.tensor(rows).T
    return torch.nn.functional.cross_entropy(logits[batch, places], wanted)


def accuracy(model: LlamaForCausalLM, texts: Sequence[Text]) -> float:
    """The share of right answers."""
    right = total = 0
    with torch.inference_mode():
        for one in texts:
            found = model(torch.tensor([one.tokens])).logits[0].argmax(dim=-1).tolist()
            right += sum(found[place - 1] == one.tokens[place] for place in one.answers)
            total += len(one.answers)
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="Where the model is saved.")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{train(options.folder, options.steps):.1%} of the answers are right")


if __name__ == "__main__":
    main()
