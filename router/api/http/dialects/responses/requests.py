"""Bodies of /v1/responses: JSON to checked requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvrelay.errors import InvalidArgument
from kvrelay.sampling_limits import INT32
from kvrelay.types.chat import ChatMessage, ChatOptions
from kvrelay.types.requests import Guidance
from kvrelay.wire.inference import SamplingOptions
from router.api.http.chat.conversation import Conversation
from router.api.http.chat.models import Function, Tool, ToolChoice
from router.api.http.chat.template_variables import template_kwargs
from router.api.http.chat.tool_use import ToolUse, tool_use_of
from router.api.http.completion import Completion, generate_requests
from router.api.http.dialects.responses.request_models import (
    Content,
    FunctionTool,
    Item,
    MessageItem,
    ResponsesRequest,
    TextContent,
)
from router.api.http.field_checks import OtherFields, validated
from router.api.http.structured_output import ANY_OBJECT, guidance_of_answer, only_guidance

Json = Mapping[str, Any]

# Fields that do not affect the tokens.
IGNORED = {
    *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "max_tool_calls"),
    *("prompt_cache_retention", "prompt_cache_options", "stream_options", "client_metadata"),
    *("context_management",),
}
_STATELESS = "this router stores no answers; send the earlier items in input"
_OTHERS = OtherFields(
    frozenset(IGNORED),
    only={"background": (False,)},
    refused={
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "prompt": "this router stores no prompts; send instructions and input",
    },
)
LOGPROBS = "message.output_text.logprobs"
# Roles of instructions.
_SYSTEM = ("system", "developer")


def parse_response(body: Json, request_id: str = "") -> Completion:
    """Parses a body of /v1/responses. `request_id` is the id if the body has none. Raises a
    KvRelayError that names the field.
    """
    request = validated(ResponsesRequest, body, _OTHERS)
    use = _tool_use(request)
    field, guidance = _guidance(request, use)
    scored = LOGPROBS in (request.include or ())
    if request.top_logprobs and not scored:
        raise InvalidArgument(f"top_logprobs needs {LOGPROBS} in include", field="top_logprobs")
    most = request.max_output_tokens
    sampling = SamplingOptions(
        # Larger values are cut to the context, too.
        max_tokens=None if most is None else min(most, INT32),
        temperature=request.temperature,
        top_p=request.top_p,
        # Both -1 and 0 disable top_k.
        top_k=0 if request.top_k == -1 else request.top_k,
        seed=request.seed,
        logprobs=(request.top_logprobs or 0) if scored else None,
        guidance=guidance,
    )
    request_id = request.request_id or request_id
    source = {"messages": _messages(request)}
    effort = (request.reasoning or {}).get("effort")
    return Completion(
        request_id=request_id,
        requests=generate_requests(request, sampling, [source], 1, request_id),
        n=1,
        chat=True,
        stream=request.stream or False,
        tool_use=use,
        chat_options=ChatOptions(
            template_kwargs=template_kwargs(request.chat_template_kwargs, effort)
        ),
        names={
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "guidance": field,
        },
        cut_to_context=True,
        repeated=_repeated(request),
    )


def _messages(request: ResponsesRequest) -> tuple[ChatMessage, ...]:
    items: list[Item] = (
        [{"role": "user", "content": request.input}]
        if isinstance(request.input, str)
        else request.input
    )
    # Many templates take a single system message, and only at the beginning.
    system = [request.instructions] if request.instructions else []
    begin = 0
    for item in items:
        message = _message(item)
        if message is None or message["role"] not in _SYSTEM:
            break
        system.append(_text(message["content"]))
        begin += 1
    conversation = Conversation()
    if system:
        conversation.say("system", "\n\n".join(system))
    for item in items[begin:]:
        _add(conversation, item)
    return conversation.messages()


def _message(item: Item) -> MessageItem | None:
    """Returns the item if it is a message. Its type may be missing."""
    return cast(MessageItem, item) if "role" in item else None


def _add(conversation: Conversation, item: Item) -> None:
    message = _message(item)
    if message is not None:
        text = _text(message["content"])
        if message["role"] == "assistant":
            conversation.answer(text)
        else:
            conversation.say(message["role"], text)
    elif item["type"] == "function_call":
        conversation.call(item["call_id"], item["name"], item["arguments"])
    elif item["type"] == "function_call_output":
        conversation.result(item["call_id"], _text(item["output"]))
    elif item["type"] == "reasoning":
        parts: Iterable[TextContent] = item.get("content") or item.get("summary") or ()
        conversation.think("\n".join(one["text"] for one in parts))


def _text(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(one.get("text") or one.get("refusal") or "" for one in content)


def _tool_use(request: ResponsesRequest) -> ToolUse | None:
    choice: ToolChoice | None = None
    if isinstance(request.tool_choice, dict):
        choice = {"type": "function", "function": {"name": request.tool_choice["name"]}}
    else:
        choice = request.tool_choice
    tools = [_tool(one) for one in request.tools or ()]
    return tool_use_of(tools, choice, request.parallel_tool_calls)


def _tool(tool: FunctionTool) -> Tool:
    function: Function = {"name": tool["name"]}
    if description := tool.get("description"):
        function["description"] = description
    if parameters := tool.get("parameters"):
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _guidance(request: ResponsesRequest, use: ToolUse | None) -> tuple[str, Guidance | None]:
    given = (request.text or {}).get("format") or {"type": "text"}
    if given["type"] == "text":
        return only_guidance(use)
    if given["type"] == "json_object":
        return only_guidance(use, text=ANY_OBJECT)
    if "schema" not in given:
        raise InvalidArgument("text.format has no schema; give the JSON schema", field="text")
    return only_guidance(use, text=guidance_of_answer(given["schema"], "text"))


def _repeated(request: ResponsesRequest) -> dict[str, Any]:
    """Returns the members of the answer that repeat the request."""
    reasoning = request.reasoning or {}
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [
            {"strict": False, "parameters": None, "description": None} | one
            for one in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
    }
