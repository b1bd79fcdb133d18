"""A worker's step costs as functions of their sizes, with a JSON form. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from kvrelay.errors import InvalidArgument
from kvrelay.planning.quantity import plain

FORMAT = "kvrelay-step-costs-1"
# measured: fitted on a device. analytic: computed from published figures of a device and a model.
Kind = Literal["measured", "analytic"]
# Seconds. Larger coefficients are mistakes.
_LARGEST = 1e6
_MAX_TEXT = 500
_MOST_BENDS = 16
_LARGEST_BATCH = 2**20


@dataclass(frozen=True, slots=True)
class StepCostModel:
    """What the steps of one worker cost. Each coefficient is in seconds per unit, 0 or more.

    - A prefill step of n tokens of one prompt that attend to c tokens each on average takes
      prefill_base_s + prefill_token_s n + prefill_token_context_s n c.
    - A decode step of b sequences that hold t tokens of KV together takes
      decode_base_s + decode_sequence_s b + decode_context_token_s t
      + more_s (b - batch) for each (batch, more_s) of decode_bends with batch < b.
    - The hand-off of n bytes takes handoff_base_s + handoff_byte_s n.

    Raises InvalidArgument for a coefficient that is negative, not finite, or above 1e6, and for
    bends whose batches do not rise.
    """

    prefill_base_s: float
    prefill_token_s: float
    prefill_token_context_s: float
    decode_base_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    handoff_base_s: float
    handoff_byte_s: float
    # From the start of a worker until it serves.
    start_s: float
    # From the last step in one pool to the first in the other.
    role_change_s: float
    kind: Kind
    # Names, for people.
    model: str = ""
    device: str = ""
    # Where the figures come from, in one sentence.
    source: str = ""
    # In ascending order. Weights are read once for all sequences; from some batch on, the
    # arithmetic of each takes longer than that.
    decode_bends: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
                raise InvalidArgument(
                    f"{name} is {value!r:.40}; it must be a number of seconds from 0 to "
                    f"{plain(_LARGEST)}",
                    field=name,
                )
        if not _are_bends(self.decode_bends):
            raise InvalidArgument(
                f"decode_bends are {self.decode_bends!r:.80}; they must be at most {_MOST_BENDS} "
                "pairs of a batch of at least 1, in ascending order, and of seconds from 0 to "
                f"{plain(_LARGEST)}",
                field="decode_bends",
            )
        if self.kind not in get_args(Kind):
            allowed = " and ".join(get_args(Kind))
            raise InvalidArgument(f"kind is {self.kind!r:.40}; allowed are {allowed}", field="kind")
        for name in _TEXTS:
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > _MAX_TEXT:
                raise InvalidArgument(
                    f"{name} is {text!r:.40}; it must be a text of at most {_MAX_TEXT} characters",
                    field=name,
                )

    def prefill_s(self, tokens: int, before: int = 0) -> float:
        """Returns the seconds of a step that prefills `tokens` tokens of a prompt after `before`
        tokens of it. Each token attends to the tokens before it and to itself.
        """
        pairs = tokens * (before + (tokens + 1) / 2)
        return (
            self.prefill_base_s
            + self.prefill_token_s * tokens
            + self.prefill_token_context_s * pairs
        )

    def prompt_s(self, tokens: int, chunk_tokens: int, before: int = 0) -> float:
        """Returns the seconds of all prefill steps of a prompt of `tokens` tokens after `before`
        cached ones, in chunks of `chunk_tokens`. The last chunk may be shorter.
        """
        steps = math.ceil(tokens / chunk_tokens)
        # The sum of prefill_s over the chunks: only the base depends on their number.
        return self.prefill_s(tokens, before) + (steps - 1) * self.prefill_base_s if steps else 0.0

    def decode_s(self, batch: int | float, context_tokens: int | float) -> float:
        """Returns the seconds of a decode step of `batch` sequences that hold `context_tokens`
        tokens of KV together.
        """
        seconds = (
            self.decode_base_s
            + self.decode_sequence_s * batch
            + self.decode_context_token_s * context_tokens
        )
        for least, more_s in self.decode_bends:
            if batch > least:
                seconds += more_s * (batch - least)
        return seconds

    def handoff_s(self, num_bytes: int | float) -> float:
        """Returns the seconds of the hand-off of `num_bytes` bytes."""
        return self.handoff_base_s + self.handoff_byte_s * num_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the model as plain data for JSON. Without bends, older versions read it too."""
        values = asdict(self)
        if not self.decode_bends:
            del values["decode_bends"]
        return {"format": FORMAT, **values}

    @classmethod
    def from_json(cls, document: object) -> StepCostModel:
        """Reads what `to_json` returned. Raises InvalidArgument."""
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else None
            what = "" if found is None else f" of the format {found!r:.60}"
            raise InvalidArgument(
                f"not step costs{what}; expected is the format {FORMAT}", field="format"
            )
        values = {name: value for name, value in document.items() if name != "format"}
        if unknown := values.keys() - _NAMES:
            raise InvalidArgument(f"step costs: {min(unknown)!r:.60} is not a known key")
        if missing := _NAMES - set(_OPTIONAL) - values.keys():
            raise InvalidArgument(f"step costs: {min(missing)} is missing", field=min(missing))
        bends = values.get("decode_bends", ())
        if isinstance(bends, list):
            values["decode_bends"] = tuple(
                tuple(bend) if isinstance(bend, list) else bend for bend in bends
            )
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> StepCostModel:
        """Reads the JSON text of a model. Raises InvalidArgument."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"not step costs: {error!s:.200}") from error
        return cls.from_json(document)


def _are_bends(bends: object) -> bool:
    if not isinstance(bends, tuple) or len(bends) > _MOST_BENDS:
        return False
    last = 0
    for bend in bends:
        if not isinstance(bend, tuple) or len(bend) != 2:
            return False
        batch, seconds = bend
        if type(batch) is not int or not last < batch <= _LARGEST_BATCH:
            return False
        if type(seconds) not in (int, float) or not 0 <= seconds <= _LARGEST:
            return False
        last = batch
    return True


_NAMES = {field.name for field in fields(StepCostModel)}
_NUMBERS = tuple(field.name for field in fields(StepCostModel) if field.name.endswith("_s"))
_TEXTS = ("model", "device", "source")
_OPTIONAL = (*_TEXTS, "decode_bends")
