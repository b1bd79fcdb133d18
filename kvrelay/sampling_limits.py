"""The allowed sampling values. Routers use this table to reject requests; workers use it because
they do not trust their peers.

The bounds keep float32 arithmetic safe: within them, a penalty or a temperature never turns a
finite logit into NaN, and overflows are clamped (`kvrelay.engine.sampling.penalties`). The bounds
include all values that OpenAI allows. Other servers clamp a temperature just above 0, or divide by
it. kvrelay samples greedily below LEAST_TEMPERATURE, because greedy sampling is the limit as the
temperature goes to 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance, SamplingParams, ThinkingMarkers

INT32 = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
# Entries.
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKENS = 1024
# Bytes of UTF-8.
MAX_GUIDANCE = 2**16
# Logprobs of one prompt, with those of the most likely tokens.
MAX_PROMPT_LOGPROBS = 2**17

# The least temperature for random sampling. In float32 the smallest temperatures are 0, and 0 / 0
# is NaN.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Limit:
    """Inclusive bounds of one number."""

    least: float
    most: float
    # What bounds the number before `most` does, in words.
    end: str = ""

    def __str__(self) -> str:
        if self.least == _ABOVE_ZERO:
            return f"above 0, at most {self.most:g}"
        return f"{self.least:g} to {self.end or format(self.most, 'g')}"


_ABOVE_ZERO = math.ulp(0.0)

LIMITS: Mapping[str, Limit] = {
    "max_tokens": Limit(1, INT32, "the end of the model's context"),
    "temperature": Limit(0.0, 100.0),
    "top_p": Limit(_ABOVE_ZERO, 1.0),
    "min_p": Limit(0.0, 1.0),
    "presence_penalty": Limit(-2.0, 2.0),
    "frequency_penalty": Limit(-2.0, 2.0),
    "repetition_penalty": Limit(0.01, 100.0),
    "top_k": Limit(0, INT32, "the size of the vocabulary"),
    "min_tokens": Limit(0, INT32, "max_tokens"),
    "logprobs": Limit(0, MAX_LOGPROBS),
    "prompt_logprobs": Limit(0, MAX_LOGPROBS),
    "thinking_token_budget": Limit(0, INT32, "max_tokens"),
}
# For clients; the sampler accepts any integer.
SEED = Limit(0, MAX_SEED, "2^63 - 1")
_LIMITS = tuple(LIMITS.items())
_numbers = attrgetter(*LIMITS)


def check_numbers(sampling: object) -> None:
    """Checks an object with the fields of SamplingParams. None means unset. Raises InvalidArgument
    naming the field.
    """
    for value, (name, limit) in zip(_numbers(sampling), _LIMITS, strict=True):
        if value is not None and not limit.least <= value <= limit.most:
            raise bad_value(name, value, str(limit))


def check_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    """Raises InvalidArgument for a token id outside the vocabulary, and for a bias that is not a
    number from -MAX_BIAS to MAX_BIAS. The message names the entry by its key, as clients write it.
    """
    for token_id, bias in logit_bias:
        entry = f'logit_bias["{token_id}"]'
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(
                f"{entry} is for a token id that the model does not have; allowed are 0 to "
                f"{vocab_size - 1}",
                field="logit_bias",
            )
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgument(
                f"{entry} is {bias}; allowed are numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}",
                field="logit_bias",
            )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Checks all parameters that the sampler reads. Raises InvalidArgument naming the field, the
    value and the allowed values.

    Takes less than a microsecond without logit_bias.
    """
    check_numbers(params)
    if params.seed is None and params.temperature >= LEAST_TEMPERATURE:
        raise bad_value("seed", None, f"{SEED} at a temperature above 0")
    check_bias(params.logit_bias, vocab_size)


def check_prompt_logprobs(params: SamplingParams, prompt_len: int) -> None:
    """Raises InvalidArgument if the prompt has too many tokens for its logprobs."""
    count = params.prompt_logprobs
    if count is not None and prompt_len * (1 + count) > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            f"{prompt_len} prompt tokens with the {count} most likely tokens each are "
            f"{prompt_len * (1 + count)} logprobs; allowed are {MAX_PROMPT_LOGPROBS}; ask for "
            "fewer, or shorten the prompt",
            field="prompt_logprobs",
        )


def check_sizes(params: SamplingParams, vocab_size: int) -> None:
    """The checks that a worker makes once per sequence, on arrival. Raises InvalidArgument like
    `check_params`.
    """
    check_guidance(params.guidance, params.ignore_eos, params.min_tokens)
    for name, count, most in (
        ("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS),
        ("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKENS),
    ):
        if count > most:
            raise InvalidArgument(f"{name} has {count} entries; allowed are {most}", field=name)
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise bad_value(
                "stop_token_ids", f"token {token_id}", f"token ids from 0 to {vocab_size - 1}"
            )
    if params.thinking is not None:
        _check_markers(params.thinking, vocab_size)


def _check_markers(thinking: ThinkingMarkers, vocab_size: int) -> None:
    for token_id in (thinking.begin, thinking.end):
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise bad_value(
                "thinking", f"token {token_id}", f"token ids from 0 to {vocab_size - 1}"
            )


def check_guidance(guidance: Guidance | None, ignore_eos: bool, min_tokens: int) -> None:
    """Raises InvalidArgument for guidance without a source or with one that is too long, and for
    options that contradict it.
    """
    if guidance is None:
        return
    size = len(guidance.source.encode(errors="surrogatepass"))
    if not 0 < size <= MAX_GUIDANCE:
        raise InvalidArgument(
            f"guidance has {size} bytes; allowed are 1 to {MAX_GUIDANCE}", field="guidance"
        )
    for option, given in (("ignore_eos", ignore_eos), ("min_tokens", min_tokens > 0)):
        if given:
            raise InvalidArgument(
                f"{option} is set, and guidance ends the answer where the grammar is complete; "
                f"leave out {option} or guidance",
                field=option,
            )


def bad_value(field: str, value: object, allowed: str) -> InvalidArgument:
    """Returns the error for a field whose value is not allowed. The message is limited to 100
    characters of the value.
    """
    return InvalidArgument(f"{field} is {value!r:.100}; allowed is {allowed}", field=field)
