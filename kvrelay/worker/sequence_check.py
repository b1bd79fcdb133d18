"""Checks a sequence before it runs. No router is trusted with the steps of others, and an invalid
sequence could fail a whole step.
"""

from __future__ import annotations

from kvrelay.errors import InvalidArgument
from kvrelay.sampling_limits import check_params, check_prompt_logprobs, check_sizes
from kvrelay.types.requests import SequenceSpec


def sequence_flaw(spec: SequenceSpec, max_model_len: int, vocab_size: int) -> str:
    """Returns why a model of this context length and vocabulary cannot run the sequence; empty if
    it can.
    """
    length = len(spec.token_ids)
    if not 0 < length < max_model_len:
        return f"{length} tokens do not fit into the context; allowed are 1 to {max_model_len - 1}"
    if not 0 <= min(spec.token_ids) <= max(spec.token_ids) < vocab_size:
        return f"a token id is outside of 0 to {vocab_size - 1}"
    if not 0 < spec.prompt_len <= length:
        return f"prompt_len is {spec.prompt_len}; allowed is 1 to {length}, the number of tokens"
    try:
        check_params(spec.sampling, vocab_size)
        check_sizes(spec.sampling, vocab_size)
        check_prompt_logprobs(spec.sampling, spec.prompt_len)
    except InvalidArgument as error:
        return error.message
    return ""
