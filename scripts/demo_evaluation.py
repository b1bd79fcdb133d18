"""How well a model predicts documents that it has not seen, and how well mere counting would."""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """exp(mean negative log likelihood per token); each document is read by itself, its first token
    is given.
    """
    model.eval()
    loss, count = 0.0, 0
    for ids in documents:
        row = torch.tensor([ids])
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        count += len(ids) - 1
    return math.exp(loss / count)


def ngram_perplexities(
    train: list[list[int]], held_out: list[list[int]], vocab_size: int
) -> tuple[float, float]:
    """Add-one unigram perplexity, and bigram perplexity that backs off to it with the weight of one
    count.
    """
    unigram = torch.ones(vocab_size, dtype=torch.float64)
    bigram = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for ids in train:
        row = torch.tensor(ids)
        unigram += torch.bincount(row, minlength=vocab_size)
        bigram.index_put_(
            (row[:-1], row[1:]), torch.ones(len(ids) - 1, dtype=torch.float64), accumulate=True
        )
    unigram /= unigram.sum()
    seen = bigram.sum(dim=1)
    before = torch.cat([torch.tensor(ids[:-1]) for ids in held_out])
    after = torch.cat([torch.tensor(ids[1:]) for ids in held_out])
    mixed = (bigram[before, after] + unigram[after]) / (seen[before] + 1)
    return float(unigram[after].log().mean().neg().exp()), float(mixed.log().mean().neg().exp())


@torch.inference_mode()
def right_answers(
    model: LlamaForCausalLM, documents: list[list[int]], assistant: int, eos: int
) -> tuple[int, int]:
    """(right, asked) over the conversations among `documents`: is the greedy first answer the
    document's own?

    One pass tells: a greedy answer is the document's if and only if each of its tokens is the
    likeliest after those before it. `assistant` is the token that begins an answer, `eos` the one
    that ends it.
    """
    model.eval()
    right = asked = 0
    for ids in documents:
        if assistant not in ids:
            continue
        start = ids.index(assistant)
        end = ids.index(eos, start)
        likeliest = (
            model(input_ids=torch.tensor([ids[:end]]), use_cache=False)
            .logits[0]
            .argmax(dim=-1)
            .tolist()
        )
        asked += 1
        right += likeliest[start:end] == ids[start + 1 : end + 1]
    return right, asked
