"""The sampling that a model's authors recommend, for requests that leave it open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.sampling_limits import check_numbers
from kvrelay.wire.inference import SamplingOptions

# The fields of generation_config.json that vLLM and SGLang take as defaults, too.
_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingOptions:
    """Returns the sampling options in the content of generation_config.json.

    Raises ValueError for a value that no request could have.
    """
    found = {name: generation[name] for name in _NAMES if generation.get(name) is not None}
    for name, value in found.items():
        kinds = (int,) if name == "top_k" else (int, float)
        if type(value) not in kinds:
            raise ValueError(f"{name} is {value!r:.40}; it must be a number")
    if found.get("top_k") == -1:
        found["top_k"] = 0  # off, as in a request
    options = SamplingOptions(**found)
    try:
        check_numbers(options)
    except InvalidArgument as error:
        raise ValueError(error.message) from None
    return options
