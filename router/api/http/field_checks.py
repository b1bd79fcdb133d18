"""Checks the fields of a request body against the model of a dialect. Pure.

A field that kvrelay does not support is an error if it would change the answer. Otherwise it is
ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvrelay.error_value import shown
from kvrelay.errors import InvalidArgument, KvRelayError, PermissionDenied, Unimplemented

M = TypeVar("M", bound=BaseModel)

# The router sets these values, under any name that other servers use. A client that could set them
# would read other clients' data.
_FORBIDDEN = {
    *("chat_template", "lease_id", "worker_id", "nvext"),
    *("kv_transfer_params", "ec_transfer_params", "disagg_prefill_dp_rank", "data_parallel_rank"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
}
_TENSORS = {"prompt_embeds", "mm_processor_kwargs", "multi_modal_data"}
# What pydantic names instead of a key where a value may have several types.
_TYPE = re.compile(r"<|(?:dict|list|tuple)\[")
# pydantic's words, and those of kvrelay's errors.
_WORDS = {
    "Input should": "it must",
    "List should": "it must",
    "Field required": "give it",
    " after validation": "",
    "Extra inputs are not permitted": "it is not known here; leave it out",
    "valid dictionary": "object",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "valid ": "",
    "a integer": "an integer",
    "a object": "an object",
}
_REASONS = {
    "it must be 'text'": "since this model takes text only",
    "it must be 'custom'": "since tools of the server do not run here; describe a tool of the "
    "client by name, description and input_schema",
    "it must be 'function'": "since other kinds of tools are not supported",
}


# Fields of other paths, as people mix them up.
_ELSEWHERE = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}


@dataclass(frozen=True, slots=True)
class OtherFields:
    """The fields of a dialect that kvrelay does not support."""

    # Fields that do not affect the tokens.
    ignored: frozenset[str]
    # The values that have no effect.
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    # What to do instead.
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, name: str, value: object, known: Collection[str] = ()) -> None:
        """Raises the error of a field that is not in the dialect's model. `known`: the fields that
        are.
        """
        if name in self.ignored or value is None:
            return
        if name in _FORBIDDEN:
            raise PermissionDenied(f"{name} is not for clients to set; leave it out", field=name)
        if name in _TENSORS:
            raise Unimplemented(f"{name}: this model takes text and token ids only", field=name)
        if name in self.refused:
            raise InvalidArgument(f"{name} is not supported; {self.refused[name]}", field=name)
        if name not in self.only:
            near = get_close_matches(name[:60], known, n=1, cutoff=0.7)
            advice = f"did you mean {near[0]}?" if near else "leave it out"
            if name in _ELSEWHERE:
                advice = f"send it to {_ELSEWHERE[name]}"
            raise InvalidArgument(
                f"{name[:60]!r} is not a field that is known here; {advice}", field=name[:60]
            )
        if value not in self.only[name]:
            allowed = "".join(f", or give {json.dumps(one)}" for one in self.only[name])
            raise InvalidArgument(f"{name} is not supported; leave it out{allowed}", field=name)


def validated(model: type[M], body: Mapping[str, Any], others: OtherFields) -> M:
    """Returns the body as the model. Raises a KvRelayError that names the first bad field."""
    fields = model.model_fields
    for name, value in body.items():
        if name not in fields:
            others.check(name, value, fields)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _step(place: str | int) -> str:
    """Formats a place inside a field: the index of a list, or the key of an object."""
    if isinstance(place, int):
        return f"[{place}]"
    # A key may be a client's, of any length.
    key = place[:60]
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key, ensure_ascii=False)}]"


def _refusal(error: ValidationError) -> KvRelayError:
    """Returns the error of the value that is nested deepest. pydantic reports an error for each
    alternative of a value, and the deepest is in the one that was meant.
    """
    vague = ("missing", "string_type")
    found = error.errors(include_url=False)
    wrong = max(found, key=lambda one: (len(one["loc"]), one["type"] not in vague))
    field, *inner = (one for one in wrong["loc"] if not _TYPE.match(str(one)))
    field = str(field)[:60]
    where = field + "".join(map(_step, inner))
    told, value = wrong["msg"], shown(wrong["input"])
    for old, new in _WORDS.items():
        told = told.replace(old, new)
    alternatives = {one["type"] for one in found if one["loc"][0] == field}
    if {"string_type", "list_type"} <= alternatives and told == "it must be a list":
        told = "it must be text or a list"
    if told in _REASONS:
        told = f"{told}, {_REASONS[told]}"
    if wrong["type"] == "missing":
        value = "missing"
    elif wrong["type"].startswith("too_"):
        given = wrong["input"]
        kind_of = "an object" if isinstance(given, Mapping) else "a list"
        value, told = f"{kind_of} of {len(given)}", told.partition(", not ")[0]
        told = told.replace("Dictionary should", "it must")
    # Another type of a part or tool is known to the client's API, and not here. No API has a type
    # that is no identifier.
    foreign = (
        wrong["type"] == "literal_error"
        and wrong["loc"][-1] == "type"
        and isinstance(wrong["input"], str)
        and wrong["input"].isascii()
        and wrong["input"].isidentifier()
    )
    kind = Unimplemented if foreign else InvalidArgument
    return kind(f"{where} is {value:.60}; {told}", field=field)
