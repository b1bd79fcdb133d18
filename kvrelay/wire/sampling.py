"""Sampling options: converts SamplingParams of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast, get_args

from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance, GuidanceKind, SamplingParams, ThinkingMarkers
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.encoding.fields import extend_field, said, set_field


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The sampling options of a client. None means unset and takes the default of
    SamplingParams.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    guidance: Guidance | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None

    def with_defaults(self, model: SamplingOptions | None = None) -> SamplingParams:
        """Returns the parameters. Unset options take those of `model`, which has numbers alone, or
        the defaults of SamplingParams.
        """
        return SamplingParams(**{**({} if model is None else model._given()), **self._given()})

    def _given(self) -> dict[str, Any]:
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}


_FIELDS = tuple(one.name for one in fields(SamplingOptions))
_OPTIONAL = tuple(
    one.name for one in fields(SamplingOptions) if one.default is None and one.name != "guidance"
)


def sampling_to_proto(sampling: SamplingOptions | SamplingParams) -> pb.SamplingParams:
    """Converts sampling options to their message. Raises InvalidArgument, naming the field, for a
    value that the message cannot hold.
    """
    message = pb.SamplingParams()
    for name in (*_OPTIONAL, "ignore_eos", "min_tokens"):
        set_field(message, name, getattr(sampling, name))
    for name in ("stop", "stop_token_ids"):
        extend_field(message, name, getattr(sampling, name))
    try:
        message.logit_bias.update(sampling.logit_bias)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"logit_bias: {said(error)}; give token ids and numbers", field="logit_bias"
        ) from error
    if sampling.guidance is not None:
        message.guidance.CopyFrom(_guidance_to_proto(sampling.guidance))
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingOptions:
    """Converts a message to sampling options. Unset fields become None. Raises InvalidArgument for
    guidance of an unknown kind.
    """
    return SamplingOptions(**_given(message))


def params_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Converts a complete set of parameters, as components of the cluster exchange it."""
    message = sampling_to_proto(params)
    if params.guidance is not None:
        message.guidance.tried_with = params.guidance.tried_with
    if params.thinking is not None:
        set_field(message.thinking, "begin", params.thinking.begin)
        set_field(message.thinking, "end", params.thinking.end)
    return message


def params_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Converts a message to a complete set of parameters, as components of the cluster exchange
    it. Raises InvalidArgument as `sampling_from_proto` does.
    """
    thinking = None
    if message.HasField("thinking"):
        markers = message.thinking
        begin = markers.begin if markers.HasField("begin") else None
        thinking = ThinkingMarkers(begin, markers.end)
    given = _given(message)
    if (guidance := given["guidance"]) is not None:
        given["guidance"] = replace(guidance, tried_with=message.guidance.tried_with)
    return SamplingParams(**given, thinking=thinking)


def _guidance_to_proto(guidance: Guidance) -> pb.Guidance:
    message = pb.Guidance()
    if guidance.kind not in get_args(GuidanceKind):
        raise InvalidArgument(
            f"guidance is of kind {guidance.kind!r:.40}; allowed are "
            f"{', '.join(get_args(GuidanceKind))}",
            field="guidance",
        )
    set_field(message, guidance.kind, guidance.source)
    return message


def _guidance_from_proto(message: pb.Guidance) -> Guidance:
    """Raises InvalidArgument for a kind of a future version, which this version cannot follow."""
    kind = message.WhichOneof("source")
    if kind is None:
        raise InvalidArgument(
            "guidance has no source that this version knows; give one of json_schema, regex and "
            "lark",
            field="guidance",
        )
    return Guidance(cast(GuidanceKind, kind), getattr(message, kind))


def _given(message: pb.SamplingParams) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)} | {
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "min_tokens": message.min_tokens,
        "logit_bias": tuple(sorted(message.logit_bias.items())),
        "guidance": _guidance_from_proto(message.guidance)
        if message.HasField("guidance")
        else None,
    }
