"""The profile of one worker: its step costs and the sizes that a simulation needs. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.planning.step_cost_model import FORMAT as COSTS_FORMAT
from kvrelay.planning.step_cost_model import StepCostModel

FORMAT = "kvrelay-profile-1"
_LARGEST = 2**40
# A list of all token ids is made of the vocabulary.
LARGEST_VOCABULARY = 2**24
_MAX_TEXT = 500
_COUNTS = ("kv_token_bytes", "max_model_len", "vocab_size")


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on a device, as `kvrelay profile` measures it. Raises InvalidArgument for a value out
    of range.
    """

    costs: StepCostModel
    # KV bytes per token, all layers.
    kv_token_bytes: int
    # Tokens of the model's context.
    max_model_len: int
    vocab_size: int
    machine: str = ""
    # The kernels that the engine chose.
    kernels: str = ""
    # Largest and root-mean-square relative error of each part of the fit.
    residuals: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            largest = LARGEST_VOCABULARY if name == "vocab_size" else _LARGEST
            if type(value) is not int or not 1 <= value <= largest:
                raise InvalidArgument(
                    f"profile: {name} is {value!r:.40}; it must be a whole number from 1 to "
                    f"{largest}",
                    field=name,
                )
        for name in ("machine", "kernels"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > _MAX_TEXT:
                raise InvalidArgument(
                    f"profile: {name} is {text!r:.40}; it must be a text of at most {_MAX_TEXT} "
                    "characters",
                    field=name,
                )
        if not isinstance(self.residuals, dict) or not all(
            isinstance(key, str) and type(value) in (int, float) and 0 <= value < math.inf
            for key, value in self.residuals.items()
        ):
            raise InvalidArgument(
                "profile: residuals must map names to numbers, 0 or more", field="residuals"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the profile as plain data for JSON."""
        return {"format": FORMAT, **asdict(self), "costs": self.costs.to_json()}

    @classmethod
    def parse(cls, text: str, kv_token_bytes: int | None = None) -> Profile:
        """Reads the JSON text of a profile, or of step costs alone. Raises InvalidArgument.

        kv_token_bytes: for step costs alone, which do not contain it.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"not a profile: {error!s:.200}") from error
        found = document.get("format") if isinstance(document, dict) else None
        if found == COSTS_FORMAT:
            if kv_token_bytes is None:
                raise InvalidArgument(
                    "the file has step costs without the KV size of a token; give --kv-token-bytes",
                    field="kv_token_bytes",
                )
            return cls(StepCostModel.from_json(document), kv_token_bytes, 2**20, 2**15)
        if found != FORMAT:
            what = "" if found is None else f": its format is {found!r:.60}"
            raise InvalidArgument(
                f"not a profile{what}; give a file that `kvrelay profile --json` wrote",
                field="format",
            )
        values = {name: value for name, value in document.items() if name != "format"}
        names = {one.name for one in fields(cls)}
        if unknown := values.keys() - names:
            raise InvalidArgument(f"profile: {min(unknown)!r:.60} is not a known key")
        if missing := {"costs", *_COUNTS} - values.keys():
            raise InvalidArgument(f"profile: {min(missing)} is missing", field=min(missing))
        values["costs"] = StepCostModel.from_json(values["costs"])
        return cls(**values)
