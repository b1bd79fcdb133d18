"""The public API: the service of proto/kvrelay/v1/inference.proto, its models, and its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from kvrelay.wire.encoding.fields import to_message, to_value
from kvrelay.wire.generate_request import GenerateRequest, request_from_proto, request_to_proto
from kvrelay.wire.generate_response import (
    GenerateResponse,
    finish_reason_from_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    response_from_proto,
    response_to_proto,
)
from kvrelay.wire.ledger import (
    handoff_from_proto,
    handoff_to_proto,
    ledger_from_proto,
    ledger_to_proto,
)
from kvrelay.wire.sampling import (
    SamplingOptions,
    params_from_proto,
    params_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

__all__ = [
    "SERVICE_NAME",
    "GenerateRequest",
    "GenerateResponse",
    "InferenceServiceServicer",
    "InferenceServiceStub",
    "ModelInfo",
    "SamplingOptions",
    "add_InferenceServiceServicer_to_server",
    "finish_reason_from_proto",
    "handoff_from_proto",
    "handoff_to_proto",
    "ledger_from_proto",
    "ledger_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "models_from_proto",
    "models_to_proto",
    "params_from_proto",
    "params_to_proto",
    "pb",
    "request_from_proto",
    "request_to_proto",
    "response_from_proto",
    "response_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
]

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that a router serves."""

    id: str
    # Tokens of prompt and answer together.
    max_model_len: int
    dtype: str
    architecture: str
    # Token ids are below this number; 0 if the router does not report it.
    vocab_size: int = 0
    # Of an adapter: the id of its base model.
    parent: str = ""
    # The id itself, or the name of an adapter's folder. Empty if the router does not report it.
    root: str = ""


def models_to_proto(models: Sequence[ModelInfo]) -> pb.ListModelsResponse:
    """Converts the models of a router to the response that lists them."""
    return pb.ListModelsResponse(models=[to_message(pb.Model, model) for model in models])


def models_from_proto(message: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Converts the response that lists the models of a router."""
    return tuple(to_value(ModelInfo, model) for model in message.models)
