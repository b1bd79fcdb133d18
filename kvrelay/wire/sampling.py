"""Sampling options: converts SamplingParams of proto/kvrelay/v1/inference.proto."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import SamplingParams
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.wire.fields import extend_field, set_field


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

    def with_defaults(self) -> SamplingParams:
        """Returns the parameters, with the defaults of SamplingParams for unset options."""
        return SamplingParams(
            **{name: value for name in _FIELDS if (value := getattr(self, name)) is not None}
        )


_FIELDS = tuple(one.name for one in fields(SamplingOptions))
_OPTIONAL = tuple(one.name for one in fields(SamplingOptions) if one.default is None)


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
            f"logit_bias: {error}; give token ids and numbers", field="logit_bias"
        ) from error
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingOptions:
    """Converts a message to sampling options. Unset fields become None."""
    return SamplingOptions(**_given(message))


params_to_proto = sampling_to_proto


def params_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Converts a message to a complete set of parameters, as components of the cluster exchange
    it.
    """
    return SamplingParams(**_given(message))


def _given(message: pb.SamplingParams) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)} | {
        "stop": tuple(message.stop),
        "stop_token_ids": tuple(message.stop_token_ids),
        "ignore_eos": message.ignore_eos,
        "min_tokens": message.min_tokens,
        "logit_bias": tuple(sorted(message.logit_bias.items())),
    }
