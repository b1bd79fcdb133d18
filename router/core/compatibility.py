"""Compatibility of workers with this router. Pure."""

from __future__ import annotations

from kvrelay.protocol_version import GUIDANCE, PROMPT_LOGPROBS, THINKING_BUDGET, ours
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import WorkerInfo


def features_of(sampling: SamplingParams) -> tuple[str, ...]:
    """Returns the features that a worker needs to do what the sampling parameters say. A worker
    without them would ignore some parameters without a word.
    """
    needed = (
        (GUIDANCE, sampling.guidance),
        (PROMPT_LOGPROBS, sampling.prompt_logprobs),
        (THINKING_BUDGET, sampling.thinking_token_budget),
    )
    return tuple(name for name, value in needed if value is not None)


def follows(info: WorkerInfo, sampling: SamplingParams) -> bool:
    """Whether the worker does what the sampling parameters say."""
    return all(one in info.protocol.features for one in features_of(sampling))


def offers(info: WorkerInfo, name: str) -> bool:
    """Whether the worker has the feature or the adapter of that name."""
    return name in info.protocol.features or name in info.adapters


def misfit(info: WorkerInfo, vocab_size: int = 0, tokenizer_id: str = "") -> str:
    """Returns the reason why this router cannot use the worker. Empty if it can.

    Two clusters may share one Redis, or a router may be older than its model's files. Then the
    worker's tokenizer may differ, and the router's token ids would be meaningless to the worker's
    model. Values that either side does not report are not compared.
    """
    if reason := ours().refuses(info.protocol):
        return reason
    if vocab_size and info.vocab_size and info.vocab_size != vocab_size:
        return (
            f"its model has a vocabulary of {info.vocab_size} tokens, this router's has "
            f"{vocab_size}; start a router with the worker's model, or give each cluster a Redis "
            "of its own"
        )
    if tokenizer_id and info.tokenizer_id and info.tokenizer_id != tokenizer_id:
        return (
            f"its model has tokenizer {info.tokenizer_id[:8]}, this router's has "
            f"{tokenizer_id[:8]}; start a router with the worker's model, or give each cluster a "
            "Redis of its own"
        )
    return ""
