"""The SDK: a blocking client and its asyncio twin over one core without I/O."""

from kvrelay.client.aio import AsyncClient, AsyncStream
from kvrelay.client.answer import Completion
from kvrelay.client.blocking import Client, Stream
from kvrelay.client.request import GenerateOptions
from kvrelay.client.retry import RetryPolicy

__all__ = ["AsyncClient", "AsyncStream", "Client", "Completion", "GenerateOptions", "RetryPolicy", "Stream"]
