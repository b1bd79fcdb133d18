"""OpenAI's request bodies: JSON to checked requests. Pure.

A field that kvrelay does not support is an error if it would change the answer. Otherwise it is
ignored.
"""

from __future__ import annotations

import json
import reprlib
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ValidationError

from kvrelay.errors import InvalidArgument, KvRelayError, PermissionDenied, Unimplemented
from kvrelay.sampling_limits import MAX_SEED
from kvrelay.types.chat import WITHOUT_TOOLS, ChatMessage, ChatOptions, ToolCall
from kvrelay.types.requests import Guidance, Slo
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.api.http.chat.models import Message
from router.api.http.chat.tool_use import ToolUse, tool_use_of
from router.api.http.json_parser import json_steps
from router.api.http.request_models import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.api.http.structured_output import (
    guidance_of_format,
    guidance_of_outputs,
    guidance_of_tools,
)

Json = Mapping[str, Any]
M = TypeVar("M", bound=BaseModel)


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
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    tool_use: ToolUse | None = None
    chat_options: ChatOptions = WITHOUT_TOOLS
    # The field that gave the grammar of the answer.
    guidance_field: str = ""

    def without_prompts(self) -> Completion:
        """Returns a copy without prompts, messages and token ids, so that their memory is freed."""
        requests = tuple(
            replace(one, prompt=None, messages=(), token_ids=()) for one in self.requests
        )
        return replace(self, requests=requests)


# Sampling options that the request has under the same name.
_SAMPLING = (
    *("temperature", "top_p", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

# Fields that kvrelay does not support, with the values that have no effect.
_ONLY: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("prompt_logprobs", "guided_grammar"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "allowed_token_ids"), ()),
    **dict.fromkeys(("truncate_prompt_tokens",), ()),
    **dict.fromkeys(("guided_choice", "bad_words", "documents", "functions"), ([],)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("echo", "continue_final_message", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True,)),
    "suffix": ("",),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
}
# The router sets these values, under any name that other servers use. A client that could set them
# would read other clients' data.
_FORBIDDEN = {
    *("chat_template", "lease_id", "worker_id", "nvext"),
    *("kv_transfer_params", "ec_transfer_params", "disagg_prefill_dp_rank", "data_parallel_rank"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
}
_TENSORS = {"prompt_embeds", "mm_processor_kwargs", "multi_modal_data"}
# Arguments of the function that renders a template, which are not variables of the template.
_TEMPLATE_ARGUMENTS = {
    *("conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("return_assistant_tokens_mask", "continue_final_message", "compiled_template", "self"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
}
# Characters of JSON.
MAX_TEMPLATE_KWARGS = 4096
# Fields that do not affect the tokens.
IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention"),
}
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
    "it must be 'function'": "since other kinds of tools are not supported",
}
# Shows a client's value at the cost of a few characters.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def object_steps(body: deque[bytes]) -> Generator[int, None, Json]:
    """Parses a body in the steps of router.api.http.json_parser, which takes the parts from the
    deque.

    Raises InvalidArgument if the body is not one JSON object with distinct keys and finite numbers.
    """
    value = yield from json_steps(body)
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


def parse_completion(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/completions. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    request = _validated(CompletionRequest, body)
    given = request.prompt
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    sources: list[dict[str, Any]] = [
        {"prompt": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in prompts
    ]
    n = _choices_per_prompt(request.n, len(sources))
    if request.best_of not in (None, n):
        raise InvalidArgument(
            f"best_of is {request.best_of}; it must equal n, {n}, since answers are not ranked",
            field="best_of",
        )
    field, guidance = _guidance(request, None)
    sampling = _sampling(request, request.max_tokens, request.logprobs, guidance)
    if request.echo:
        sampling = replace(sampling, prompt_logprobs=request.logprobs)
    completion = _completion(request, sampling, sources, n, request_id)
    return replace(completion, guidance_field=field)


def parse_chat(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/chat/completions. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    request = _validated(ChatRequest, body)
    if request.top_logprobs and not request.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    limit = request.max_completion_tokens
    limit = request.max_tokens if limit is None else limit
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tool_use = tool_use_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    field, guidance = _guidance(request, tool_use)
    sampling = _sampling(request, limit, logprobs, guidance)
    source = {"messages": chat_messages(request.messages)}
    n = _choices_per_prompt(request.n, 1)
    completion = _completion(request, sampling, [source], n, request_id)
    return replace(
        completion,
        tool_use=tool_use,
        chat_options=ChatOptions(template_kwargs=_template_kwargs(request)),
        guidance_field=field,
    )


def parse_tokenize(body: Json) -> TokenizeRequest:
    """Parses a body of /tokenize. Raises a KvRelayError that names the field."""
    request = _validated(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidArgument("give either prompt or messages", field="prompt")
    return request


def parse_detokenize(body: Json) -> tuple[str, list[int]]:
    """Parses a body of /detokenize into the model and the token ids. Raises a KvRelayError that
    names the field.
    """
    request = _validated(DetokenizeRequest, body)
    return request.model or "", request.tokens


def chat_messages(messages: list[Message]) -> tuple[ChatMessage, ...]:
    """Returns the conversation. The text parts of a content are joined."""
    return tuple(
        ChatMessage(
            role=one["role"],
            content="".join(part["text"] for part in content)
            if isinstance(content := one.get("content"), list)
            else content,
            tool_calls=tuple(
                ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in one.get("tool_calls") or ()
            ),
            reasoning=one.get("reasoning_content"),
            tool_call_id=one.get("tool_call_id"),
            name=one.get("name"),
        )
        for one in messages
    )


def _template_kwargs(request: ChatRequest) -> str:
    given = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        given.setdefault("reasoning_effort", request.reasoning_effort)
    reserved = sorted(given.keys() & _TEMPLATE_ARGUMENTS)
    if reserved:
        raise PermissionDenied(
            f"chat_template_kwargs has {', '.join(reserved)}, which the router sets; leave it out",
            field="chat_template_kwargs",
        )
    written = json.dumps(given) if given else ""
    if len(written) > MAX_TEMPLATE_KWARGS:
        raise InvalidArgument(
            f"chat_template_kwargs has {len(written)} characters of JSON; allowed are "
            f"{MAX_TEMPLATE_KWARGS}; send long texts as messages",
            field="chat_template_kwargs",
        )
    return written


def _completion(
    body: CompletionRequest | ChatRequest,
    sampling: SamplingOptions,
    sources: list[dict[str, Any]],
    n: int,
    request_id: str,
) -> Completion:
    reports = body.stream_options or {}
    request_id = body.request_id or request_id
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
    return Completion(
        request_id=request_id,
        requests=tuple(requests),
        n=n,
        chat=isinstance(body, ChatRequest),
        stream=body.stream or False,
        include_usage=reports.get("include_usage") or False,
        continuous_usage=reports.get("continuous_usage_stats") or False,
        return_token_ids=body.return_token_ids or False,
        echo=isinstance(body, CompletionRequest) and body.echo is True,
    )


def _choices_per_prompt(given: int | None, num_prompts: int) -> int:
    n = 1 if given is None else given
    if n * num_prompts > MAX_CHOICES:
        raise InvalidArgument(
            f"n is {n} for {num_prompts} prompts; allowed are {MAX_CHOICES} choices in one request",
            field="n",
        )
    return n


def _sampling(
    body: CompletionRequest | ChatRequest,
    max_tokens: int | None,
    logprobs: int | None,
    guidance: Guidance | None,
) -> SamplingOptions:
    stop = () if body.stop is None else body.stop
    bias = body.logit_bias or {}
    return SamplingOptions(
        max_tokens=max_tokens,
        # Both -1 and 0 disable top_k.
        top_k=0 if body.top_k == -1 else body.top_k,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
        min_tokens=body.min_tokens or 0,
        logit_bias=tuple(sorted((int(key), value) for key, value in bias.items())),
        logprobs=logprobs,
        guidance=guidance,
        **{name: getattr(body, name) for name in _SAMPLING},
    )


def _guidance(
    body: CompletionRequest | ChatRequest, use: ToolUse | None
) -> tuple[str, Guidance | None]:
    """Returns the grammar that the answer follows, with the field that gives it. Raises
    InvalidArgument.
    """
    asked = {
        "tool_choice": guidance_of_tools(use),
        "response_format": guidance_of_format(body.response_format),
        "structured_outputs": guidance_of_outputs(body.structured_outputs),
    }
    found = {name: one for name, one in asked.items() if one is not None}
    if len(found) > 1:
        raise InvalidArgument(
            f"{' and '.join(found)} each prescribe the answer; give one of them",
            field=next(reversed(found)),
        )
    field, guidance = next(iter(found.items()), ("", None))
    if guidance is not None and use is not None and use.mode == "auto":
        raise InvalidArgument(
            f"{field} prescribes the answer, so it cannot have calls; leave tools out, or set "
            "tool_choice to none",
            field=field,
        )
    return field, guidance


def _validated(model: type[M], body: Json) -> M:
    """Returns the body as the model. Raises a KvRelayError that names the first bad field."""
    fields = model.model_fields
    for name, value in body.items():
        if name not in fields and name not in IGNORED and value is not None:
            _check_unsupported(name, value)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _check_unsupported(name: str, value: object) -> None:
    if name in _FORBIDDEN:
        raise PermissionDenied(f"{name} is not for clients to set; leave it out", field=name)
    if name in _TENSORS:
        raise Unimplemented(f"{name}: this model takes text and token ids only", field=name)
    if name not in _ONLY:
        raise InvalidArgument(
            f"{name[:60]!r} is not a field that is known here; leave it out", field=name[:60]
        )
    if value not in _ONLY[name]:
        allowed = "".join(f", or give {json.dumps(one)}" for one in _ONLY[name])
        raise InvalidArgument(f"{name} is not supported; leave it out{allowed}", field=name)


def _refusal(error: ValidationError) -> KvRelayError:
    """Returns the error of the value that is nested deepest. pydantic reports an error for each
    alternative of a value, and the deepest is in the one that was meant.
    """
    vague = ("missing", "string_type")
    wrong = max(
        error.errors(include_url=False), key=lambda one: (len(one["loc"]), one["type"] not in vague)
    )
    field, *inner = (str(one) for one in wrong["loc"] if not str(one).startswith("<"))
    where = field + "".join(f"[{one}]" if one.isdecimal() else f".{one}" for one in inner)
    told, shown = wrong["msg"], _SHORT.repr(wrong["input"])
    for old, new in _WORDS.items():
        told = told.replace(old, new)
    if told in _REASONS:
        told = f"{told}, {_REASONS[told]}"
    if wrong["type"] == "missing":
        shown = "missing"
    elif wrong["type"].startswith("too_"):
        shown = f"a list of {len(wrong['input'])}"
    # Another type of a part or tool is known to OpenAI, and not here.
    foreign = wrong["type"] == "literal_error" and wrong["loc"][-1] == "type"
    kind = Unimplemented if foreign else InvalidArgument
    return kind(f"{where} is {shown:.60}; {told}", field=field)
