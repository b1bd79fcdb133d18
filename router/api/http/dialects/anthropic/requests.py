"""Anthropic's request bodies: JSON to checked requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.sampling_limits import INT32
from kvrelay.types.chat import ChatMessage, ChatOptions
from kvrelay.types.requests import Guidance
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.api.http.chat.conversation import Conversation
from router.api.http.chat.models import Function, Tool, ToolChoice
from router.api.http.chat.template_variables import template_kwargs
from router.api.http.chat.tool_use import ToolUse, tool_use_of
from router.api.http.completion import Completion, generate_requests
from router.api.http.dialects.anthropic.request_models import (
    Block,
    Choice,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    Turn,
)
from router.api.http.field_checks import OtherFields, validated
from router.api.http.json_writing import has_more_values
from router.api.http.structured_output import guidance_of_answer, only_guidance

Json = Mapping[str, Any]

# Fields that do not affect the tokens, or only which part of a long conversation is kept.
IGNORED = {
    *("metadata", "service_tier", "inference_geo", "speed", "diagnostics", "cache_control"),
    *("betas", "anthropic_beta", "anthropic_version", "user_profile_id", "workspace_id"),
    *("context_management", "fallbacks", "fallback_credit_token", "billing_policy"),
}
_OTHERS = OtherFields(
    frozenset(IGNORED),
    only={"mcp_servers": ([],)},
    refused={
        "compaction": "this router summarizes no conversations; leave it out",
        "container": "this router runs no server tools; leave it out",
        "prefill": "end messages with a turn of the user",
        "thread": "this router stores no conversations; send all turns in messages",
    },
)
# Values in the inputs of all calls. Texts among them may be long.
_MAX_INPUT_VALUES = 2**16
# Joins the texts of a turn or of the system prompt.
_BETWEEN = "\n"
# Claude Code begins its system prompt with a line that differs in every request. It is no part of
# the prompt, and no cached prefix would go beyond it.
_BILLING = "x-anthropic-billing-header:"


def parse_messages(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/messages. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    request = validated(MessagesRequest, body, _OTHERS)
    if request.messages[-1]["role"] == "assistant":
        raise InvalidArgument(
            "messages ends with a turn of the assistant, and the beginning of an answer cannot be "
            "given; end with a turn of the user",
            field="messages",
        )
    use = _tool_use(request)
    field, guidance = _guidance(request, use)
    sampling = SamplingOptions(
        max_tokens=min(request.max_tokens, INT32),
        temperature=request.temperature,
        top_p=request.top_p,
        # Both -1 and 0 disable top_k.
        top_k=0 if request.top_k == -1 else request.top_k,
        seed=request.seed,
        stop=tuple(request.stop_sequences or ()),
        guidance=guidance,
    )
    request_id = request.request_id or request_id
    source = {"messages": _messages(request)}
    return Completion(
        request_id=request_id,
        requests=generate_requests(request, sampling, [source], 1, request_id),
        n=1,
        chat=True,
        stream=request.stream or False,
        tool_use=use,
        chat_options=_chat_options(request),
        names={"stop": "stop_sequences", "guidance": field},
        cut_to_context=True,
        thinking_tokens=_thinking_tokens(request),
    )


def parse_count_tokens(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/messages/count_tokens into a request that is not served. Raises a
    KvRelayError that names the field.
    """
    request = validated(CountTokensRequest, body, replace(_OTHERS, ignored=_NOT_COUNTED))
    use = _tool_use(request)
    _, guidance = _guidance(request, use)
    counted = GenerateRequest(
        model=request.model or "",
        messages=_messages(request),
        sampling=SamplingOptions(guidance=guidance),
    )
    return Completion(
        request_id=request_id,
        requests=(counted,),
        n=1,
        chat=True,
        stream=False,
        tool_use=use,
        chat_options=_chat_options(request),
    )


_Request = MessagesRequest | CountTokensRequest
# Clients count the body that they are going to send.
_NOT_COUNTED = frozenset(IGNORED | {"compaction"} | MessagesRequest.model_fields.keys())


def _messages(request: _Request) -> tuple[ChatMessage, ...]:
    conversation = Conversation(_BETWEEN)
    system = request.system
    if system:
        conversation.say("system", system if isinstance(system, str) else _system_text(system))
    inputs = [
        block["input"]
        for turn in request.messages
        if not isinstance(turn["content"], str)
        for block in turn["content"]
        if block["type"] == "tool_use"
    ]
    if has_more_values(inputs, _MAX_INPUT_VALUES):
        raise InvalidArgument(
            f"the inputs of tool_use have more than {_MAX_INPUT_VALUES} values; leave out early "
            "turns",
            field="messages",
        )
    for number, turn in enumerate(request.messages):
        _add_turn(conversation, number, turn)
    return conversation.messages()


def _add_turn(conversation: Conversation, number: int, turn: Turn) -> None:
    role, content = turn["role"], turn["content"]
    blocks: list[Block] = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content
    )
    # An empty turn is one too.
    for block in blocks or [TextBlock(type="text", text="")]:
        if not _add_block(conversation, role, block):
            raise InvalidArgument(
                f"messages[{number}] has the role {role} and a block of type {block['type']}; "
                "tool_use and thinking are the assistant's, tool_result is the user's",
                field="messages",
            )


def _add_block(conversation: Conversation, role: str, block: Block) -> bool:
    """Returns False for a block that the role does not have."""
    assistant = role == "assistant"
    if block["type"] == "text":
        conversation.answer(block["text"]) if assistant else conversation.say(role, block["text"])
    elif block["type"] == "tool_result":
        if role != "user":
            return False
        text = _result_text(block.get("content"), block.get("is_error") or False)
        conversation.result(block["tool_use_id"], text)
    elif not assistant:
        return False
    elif block["type"] == "thinking":
        conversation.think(block["thinking"])
    elif block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        conversation.call(block["id"], block["name"], arguments)
    return True


def _system_text(blocks: Iterable[TextBlock]) -> str:
    return _BETWEEN.join(one["text"] for one in blocks if not one["text"].startswith(_BILLING))


def _result_text(content: str | list[TextBlock] | None, is_error: bool) -> str:
    """Returns the text of a result. Templates have no place for is_error, so the text tells it."""
    text = (
        content if isinstance(content, str) else _BETWEEN.join(one["text"] for one in content or ())
    )
    return f"Error: {text}" if is_error and not text[:5].lower().startswith("error") else text


def _chat_options(request: _Request) -> ChatOptions:
    more: dict[str, object] = {}
    if request.thinking is not None:
        thinks = request.thinking["type"] != "disabled"
        # The switch has one name in the templates of Qwen, GLM and others, another in DeepSeek's.
        more = {"enable_thinking": thinks, "thinking": thinks}
        if budget := request.thinking.get("budget_tokens"):
            more["thinking_budget"] = budget
    effort = (request.output_config or {}).get("effort")
    return ChatOptions(
        template_kwargs=template_kwargs(request.chat_template_kwargs, effort, **more)
    )


def _thinking_tokens(request: _Request) -> int | None:
    thinking = request.thinking
    if thinking is None or thinking["type"] != "enabled":
        return None
    budget = thinking.get("budget_tokens")
    return None if budget is None else min(budget, INT32)


def _tool_use(request: _Request) -> ToolUse | None:
    choice = request.tool_choice
    parallel = choice is None or not choice.get("disable_parallel_tool_use")
    return tool_use_of([_tool(one) for one in request.tools or ()], _choice(choice), parallel)


def _tool(tool: ClientTool) -> Tool:
    function: Function = {"name": tool["name"]}
    if description := tool.get("description"):
        function["description"] = description
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _choice(choice: Choice | None) -> ToolChoice | None:
    match choice:
        case None | {"type": "auto"}:
            return None
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "tool"}:
            raise InvalidArgument(
                "tool_choice has the type tool and no name; give the name of a tool",
                field="tool_choice",
            )
    return "none"


def _guidance(request: _Request, use: ToolUse | None) -> tuple[str, Guidance | None]:
    config = request.output_config or {}
    given = {"output_config": config.get("format"), "output_format": request.output_format}
    return only_guidance(
        use,
        **{
            name: None if one is None else guidance_of_answer(one["schema"], name)
            for name, one in given.items()
        },
    )
