"""The SDK: a blocking client and an asyncio client over one shared core without I/O."""

from kvrelay.client import quiet_grpc  # noqa: F401
from kvrelay.client.aio import AsyncClient, AsyncStream
from kvrelay.client.answer import Completion, Token
from kvrelay.client.blocking import Client, Stream
from kvrelay.client.request import GenerateOptions
from kvrelay.client.retry import RetryPolicy
from kvrelay.types.requests import Attempt, Handoff, Ledger, TokenLogprobs, Usage
from kvrelay.wire.inference import GenerateResponse, ModelInfo

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Attempt",
    "Client",
    "Completion",
    "GenerateOptions",
    "GenerateResponse",
    "Handoff",
    "Ledger",
    "ModelInfo",
    "RetryPolicy",
    "Stream",
    "Token",
    "TokenLogprobs",
    "Usage",
]
