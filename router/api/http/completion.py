"""A generation request over HTTP, as the endpoint serves it for every dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from kvrelay.sampling_limits import MAX_SEED
from kvrelay.types.chat import WITHOUT_TOOLS, ChatOptions
from kvrelay.types.requests import Slo
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.api.http.chat.tool_use import ToolUse
from router.api.http.common_fields import Generation

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One HTTP request: `n` generations per prompt, and the options of the response.

    `requests` are in the order of the choices: all of the first prompt, then all of the second, ...
    """

    # Id of the HTTP request. With several choices, each choice's id begins with it.
    request_id: str
    requests: tuple[GenerateRequest, ...]
    n: int
    chat: bool
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    tool_use: ToolUse | None = None
    chat_options: ChatOptions = WITHOUT_TOOLS
    # A thinking budget that has no effect on a model whose thinking cannot be ended.
    thinking_tokens: int | None = None
    # Names of fields in the HTTP request, by kvrelay's names for them. "guidance" is the field that
    # gave the grammar of the answer, or empty.
    names: Mapping[str, str] = field(default_factory=dict)
    # Whether max_tokens may be more than the context holds, and is cut then.
    cut_to_context: bool = False
    # Members of the request that the dialect's answer repeats.
    repeated: Json = field(default_factory=dict)

    def with_sampling(self, **options: Any) -> Completion:
        """Returns a copy whose requests have other sampling options."""
        requests = tuple(
            replace(one, sampling=replace(one.sampling, **options)) for one in self.requests
        )
        return replace(self, requests=requests)

    def without_prompts(self) -> Completion:
        """Returns a copy without prompts, messages and token ids, so that their memory is freed."""
        requests = tuple(
            replace(one, prompt=None, messages=(), token_ids=()) for one in self.requests
        )
        return replace(self, requests=requests)


def generate_requests(
    body: Generation,
    sampling: SamplingOptions,
    sources: list[dict[str, Any]],
    n: int,
    request_id: str,
) -> tuple[GenerateRequest, ...]:
    """Returns `n` requests for each source: the prompt, token ids or messages by its name."""
    count = len(sources) * n
    requests = []
    for number in range(count):
        prompt, choice = divmod(number, n)
        options = sampling
        if choice and sampling.seed is not None:
            # 63 bits of the hash. Without a seed, admission derives one from the choice's id.
            hashed = xxhash.xxh3_64_intdigest(f"{sampling.seed}-{choice}".encode())
            options = replace(sampling, seed=hashed & MAX_SEED)
        requests.append(
            GenerateRequest(
                request_id=f"{request_id}-{number}" if request_id and count > 1 else request_id,
                model=body.model or "",
                sampling=options,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                slo=Slo(**body.slo or {}),
                **sources[prompt],
            )
        )
    return tuple(requests)
