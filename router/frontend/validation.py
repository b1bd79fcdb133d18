"""Validation of requests. Every field is checked before any allocation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import xxhash

from kvrelay.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from kvrelay.planning.quantity import plain
from kvrelay.sampling_limits import (
    INT32,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_TOKENS,
    SEED,
    check_bias,
    check_guidance,
    check_numbers,
    check_prompt_logprobs,
)
from kvrelay.sampling_limits import bad_value as _bad
from kvrelay.tenants import Tenant
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import SamplingParams, Slo, ThinkingMarkers
from kvrelay.types.workers import ModelVersion
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.frontend.model_card import ModelCard

MAX_REQUEST_ID = 128  # characters
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_CACHE_SALT = 256  # characters
MAX_SLO_MS = 1e9
DEFAULT_MAX_TOKENS = SamplingParams().max_tokens


def check_request(request: GenerateRequest, card: ModelCard) -> None:
    """Checks all fields that do not depend on the tokenized prompt. Raises InvalidArgument for the
    field, or NotFound for the model.
    """
    check_request_id(request.request_id)
    check_model(request.model, card)
    _check_source(request)
    for field, token_ids in (("token_ids", request.token_ids), ("resume", request.resume)):
        # The length is checked before the values.
        if len(token_ids) > card.info.max_model_len:
            raise InvalidArgument(
                f"{field} has {len(token_ids)} tokens, and the context of the model is "
                f"{card.info.max_model_len}; shorten it",
                field=field,
            )
    check_token_ids("token_ids", request.token_ids, card)
    check_token_ids("resume", request.resume, card)
    _check_sampling(request.sampling, card)
    if request.cache_salt is not None:
        _check_cache_salt(request.cache_salt)
    _check_slo(request.slo)
    if not -INT32 - 1 <= request.priority <= INT32:
        raise _bad("priority", request.priority, "a 32-bit integer")


def check_priority(priority: int, tenant: Tenant) -> None:
    """Raises PermissionDenied if the priority is too urgent for the tenant, because urgent requests
    can starve other tenants.
    """
    if tenant.min_priority is not None and priority < tenant.min_priority:
        raise PermissionDenied(
            f"priority {priority} is below the minimum {tenant.min_priority} of tenant "
            f"{tenant.name}; use a higher number, or change min_priority in the tokens file",
            field="priority",
        )


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument unless the id is short printable ASCII without outer spaces."""
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidArgument(
            f"request_id has {len(request_id)} characters; allowed are {MAX_REQUEST_ID}",
            field="request_id",
        )
    if not request_id.isprintable() or not request_id.isascii() or request_id != request_id.strip():
        raise _bad(
            "request_id", request_id, "printable ASCII that neither begins nor ends with a space"
        )


def _check_cache_salt(cache_salt: str) -> None:
    """Raises InvalidArgument. The messages do not contain the salt, since it may be a secret."""
    if len(cache_salt) > MAX_CACHE_SALT:
        raise InvalidArgument(
            f"cache_salt has {len(cache_salt)} characters; allowed are 1 to {MAX_CACHE_SALT}; "
            "use a hash instead",
            field="cache_salt",
        )
    check_text("cache_salt", cache_salt)


def _check_slo(slo: Slo) -> None:
    for name in ("ttft_ms", "itl_ms"):
        value = getattr(slo, name)
        if value is not None and not 0 < value <= MAX_SLO_MS:
            raise _bad(f"slo.{name}", value, f"a number above 0 and at most {plain(MAX_SLO_MS)}")


def check_model(model: str, card: ModelCard) -> None:
    """Raises NotFound if `model` is neither empty nor the name of the served model or of an
    adapter.
    """
    if model and model != card.info.id and card.adapters.get(model) is None:
        near = card.adapters.near(model, card.info.id)
        # It is named anyway.
        hint = f"; did you mean {near!r}?" if near and near != card.info.id else ""
        raise NotFound(
            f"model {model[:100]!r} does not exist; this cluster serves {card.info.id!r}"
            f"{card.adapters.described}{hint}",
            field="model",
        )


def adapter_of(request: GenerateRequest, card: ModelCard) -> str:
    """Returns the id of the request's adapter; empty for the base model.

    Raises NotFound if the adapter was unloaded since the request was checked, and
    FailedPrecondition if the tokens in `resume` are from another adapter, or from another version
    of it.
    """
    check_model(request.model, card)
    found = card.adapters.get(request.model)
    adapter = "" if found is None else found.adapter_id
    began = resumed_model(request)
    if began is not None and request.resume and began.adapter != adapter:
        raise FailedPrecondition(
            f"the tokens in resume are from {_weights(began.adapter)}, and "
            f"{request.model or card.info.id!r:.100} is now {_weights(adapter)}; send the request "
            "again without resume and system_fingerprint",
            field="system_fingerprint",
        )
    return adapter


def _weights(adapter: str) -> str:
    return f"version {adapter[:8]} of an adapter" if adapter else "the base model"


def check_text(field: str, text: str, place: str = "", *, nul: bool = False) -> None:
    """Raises InvalidArgument for text that is empty, contains NUL, or is not valid Unicode.

    place: of the text within the field. nul: allows NUL, for texts that the model reads: the output
    of tools may have it.
    """
    if not text:
        raise InvalidArgument(f"{field} is empty; give at least one character", field=field)
    if "\0" in text and not nul:
        raise InvalidArgument(
            f"{field}{place} has a NUL character at {text.index(chr(0))}; remove it", field=field
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field}{place} contains an unpaired surrogate at {error.start}; send valid Unicode",
            field=field,
        ) from None


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Checks a conversation. Raises InvalidArgument as check_text does. Texts that the model reads
    may be empty and contain NUL.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument(
            f"messages has {len(messages)} entries; allowed are {MAX_MESSAGES}", field="messages"
        )
    calls = sum(len(one.tool_calls) for one in messages)
    if calls > MAX_MESSAGES:
        raise InvalidArgument(
            f"messages have {calls} tool calls; allowed are {MAX_MESSAGES}", field="messages"
        )
    for position, one in enumerate(messages):
        if not one.role:
            raise InvalidArgument(f"messages[{position}] has no role", field="messages")
        if one.content is None and not one.tool_calls:
            raise InvalidArgument(
                f"messages[{position}] has no content; give text"
                + (", or tool_calls" if one.role == "assistant" else ""),
                field="messages",
            )
        for name, text, nul in _texts(one):
            if text:
                check_text("messages", text, f"[{position}].{name}", nul=nul)


def _texts(message: ChatMessage) -> Iterator[tuple[str, str | None, bool]]:
    """Yields the texts of a message with their places, and whether they may contain NUL."""
    yield "role", message.role, False
    yield "content", message.content, True
    yield "reasoning", message.reasoning, True
    yield "tool_call_id", message.tool_call_id, False
    yield "name", message.name, False
    for number, call in enumerate(message.tool_calls):
        yield f"tool_calls[{number}].id", call.id, False
        yield f"tool_calls[{number}].name", call.name, False
        yield f"tool_calls[{number}].arguments", call.arguments, True


def check_token_ids(field: str, token_ids: Collection[int], card: ModelCard) -> None:
    """Raises InvalidArgument for a token id outside the model's vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        return
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < card.vocab_size:
            raise InvalidArgument(
                f"{field}[{position}] is {token_id}; allowed are 0 to {card.vocab_size - 1}",
                field=field,
            )


def admit_sampling(
    request: GenerateRequest,
    request_id: str,
    num_prompt_tokens: int,
    max_model_len: int,
    tenant: Tenant,
    defaults: SamplingOptions | None = None,
) -> SamplingParams:
    """Completes the request's sampling once the prompt's length is known. `defaults`: the model's.

    - An unset max_tokens of a prompt becomes 64, cut to the free context. An answer to messages may
      fill the context, up to a tenth of the tokens that its tenant may use in a minute.
    - An unset seed is derived from the request id. So another router with the same id and the
      tokens so far continues with the same tokens.

    Raises InvalidArgument for `prompt` or `max_tokens` if they do not fit into the context, and for
    `prompt_logprobs` of a prompt that is too long for them.
    """
    source = "token_ids" if request.token_ids else "messages" if request.messages else "prompt"
    if num_prompt_tokens == 0:
        raise InvalidArgument(f"{source} has no tokens; give at least one", field=source)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise InvalidArgument(
            f"{source} has {num_prompt_tokens} tokens; the context of {max_model_len} tokens "
            "must hold the prompt and at least one token of the answer; shorten it",
            field=source,
        )
    options = request.sampling
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = min(room, _default_max_tokens(request, tenant))
    if max_tokens > room:
        raise InvalidArgument(
            f"max_tokens {max_tokens} and {num_prompt_tokens} prompt tokens exceed the context "
            f"of {max_model_len} tokens; set max_tokens to at most {room}",
            field="max_tokens",
        )
    if options.min_tokens > max_tokens:
        raise _bad("min_tokens", options.min_tokens, f"0 to max_tokens, {max_tokens}")
    if len(request.resume) > max_tokens:
        raise InvalidArgument(
            f"resume has {len(request.resume)} tokens, more than max_tokens {max_tokens}",
            field="resume",
        )
    seed = (
        xxhash.xxh3_64_intdigest(request_id.encode()) & MAX_SEED
        if options.seed is None
        else options.seed
    )
    sampling = replace(options.with_defaults(defaults), max_tokens=max_tokens, seed=seed)
    check_prompt_logprobs(sampling, num_prompt_tokens)
    return sampling


def limit_thinking(
    sampling: SamplingParams, tenant: Tenant, markers: ThinkingMarkers | None
) -> SamplingParams:
    """Applies the tenant's limit to the thinking budget. `markers`: the tokens around the model's
    thinking, if it has them.

    Raises InvalidArgument for a budget if the model has no such tokens.
    """
    asked, most = sampling.thinking_token_budget, tenant.max_reasoning_tokens
    budget = min((one for one in (asked, most) if one is not None), default=None)
    if budget is None:
        return sampling
    if markers is None and asked is not None:
        raise InvalidArgument(
            "this model does not think between two tokens of its vocabulary, such as <think> and "
            "</think>; leave thinking_token_budget out",
            field="thinking_token_budget",
        )
    if markers is None or sampling.guidance is not None:
        return replace(sampling, thinking_token_budget=None)
    return replace(sampling, thinking_token_budget=budget, thinking=markers)


def _default_max_tokens(request: GenerateRequest, tenant: Tenant) -> int:
    if not request.messages:
        return DEFAULT_MAX_TOKENS
    # A chat must not use up the limit for those beside it.
    limit = tenant.tokens_per_minute
    return INT32 if limit is None else max(DEFAULT_MAX_TOKENS, limit // 10)


def _check_source(request: GenerateRequest) -> None:
    given = [
        name
        for name, there in (
            ("prompt", request.prompt is not None),
            ("messages", bool(request.messages)),
            ("token_ids", bool(request.token_ids)),
        )
        if there
    ]
    if len(given) != 1:
        what = " and ".join(given) or "none of them"
        raise InvalidArgument(
            f"give exactly one of prompt, messages and token_ids, not {what}",
            field=given[-1] if given else "prompt",
        )
    if request.prompt is not None:
        check_text("prompt", request.prompt, nul=True)
    check_messages(request.messages)


def _check_sampling(options: SamplingOptions, card: ModelCard) -> None:
    check_numbers(options)
    if options.seed is not None and not 0 <= options.seed <= MAX_SEED:
        raise _bad("seed", options.seed, str(SEED))
    _check_stops(options, card)
    if len(options.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument(
            f"logit_bias has {len(options.logit_bias)} entries; allowed are {MAX_LOGIT_BIAS}",
            field="logit_bias",
        )
    check_bias(options.logit_bias, card.vocab_size)
    if options.guidance is not None:
        check_text("guidance", options.guidance.source)
        check_guidance(options.guidance, options.ignore_eos, options.min_tokens)


def _check_stops(options: SamplingOptions, card: ModelCard) -> None:
    if len(options.stop) > MAX_STOPS:
        raise InvalidArgument(
            f"stop has {len(options.stop)} strings; allowed are {MAX_STOPS}", field="stop"
        )
    for one in options.stop:
        check_text("stop", one)
        if len(one) > MAX_STOP_LENGTH:
            raise InvalidArgument(
                f"a stop string has {len(one)} characters; allowed are {MAX_STOP_LENGTH}",
                field="stop",
            )
    if len(options.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument(
            f"stop_token_ids has {len(options.stop_token_ids)} entries; allowed are "
            f"{MAX_STOP_TOKENS}",
            field="stop_token_ids",
        )
    check_token_ids("stop_token_ids", options.stop_token_ids, card)


def resumed_model(request: GenerateRequest) -> ModelVersion | None:
    """Returns the model version that began the answer, if the client names it. Raises
    InvalidArgument.
    """
    if not request.system_fingerprint:
        return None
    try:
        return ModelVersion.from_fingerprint(request.system_fingerprint)
    except ValueError:
        raise InvalidArgument(
            f"system_fingerprint {request.system_fingerprint!r:.100} is not valid; send the "
            "one that came with the tokens in resume, or leave it out",
            field="system_fingerprint",
        ) from None
