"""Measures how well a model and n-gram models predict held-out documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from transformers import LlamaForCausalLM


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    """Returns exp(mean negative log likelihood per token). Each document is evaluated
    separately; its first token is given.
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
    """Returns the perplexity of an add-one unigram model, and of a bigram model that backs off
    to the unigram model with the weight of one count.
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
    """Returns (right, asked) over the conversations in `documents`. A conversation counts as right
    if the greedy first answer equals the answer of the document.

    One forward pass is enough: the answers are equal if and only if each token of the document's
    answer is the most likely token at its position. assistant: the token that begins an answer.
    eos: the token that ends it.
    """
    model.eval()
    right = asked = 0
    for prompt, answer in first_turns(documents, assistant, eos):
        tokens = torch.tensor([prompt + answer[:-1]])
        likeliest = model(input_ids=tokens, use_cache=False).logits[0].argmax(dim=-1).tolist()
        asked += 1
        right += likeliest[len(prompt) - 1 :] == answer
    return right, asked


def first_turns(
    documents: Iterable[list[int]], assistant: int, eos: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (prompt, answer) of the first turn of each conversation. The prompt ends with the
    token that begins an answer, the answer with the token that ends it.
    """
    for ids in documents:
        if assistant in ids:
            start = ids.index(assistant) + 1
            yield ids[:start], ids[start : ids.index(eos, start) + 1]
