"""How the text of an answer becomes content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrelay.errors import InvalidArgument
from kvrelay.sampling_limits import MAX_GUIDANCE
from kvrelay.tenants import Tenant
from kvrelay.types.requests import Guidance
from router.api.http.chat.answer import ChatAnswer
from router.api.http.chat.tool_use import ToolUse
from router.api.http.completion import Completion
from router.api.http.structured_output import guidance_with_calls
from router.frontend.answer_parsers.formats import TOOL_FORMATS, ToolFormat
from router.frontend.answer_parsers.named_call import NamedCallParser
from router.frontend.answer_parsers.parser import AnswerParser
from router.frontend.answer_parsers.reasoning import ReasoningSplitter
from router.frontend.guidance_check import GuidanceCheck
from router.frontend.tokenization import Text
from router.runtime.stream import Stream


class AnswerFormat:
    """The format of the answers to one HTTP request."""

    def __init__(self, completion: Completion, text: Text, guidance: GuidanceCheck) -> None:
        """Raises InvalidArgument for tools that the model cannot use."""
        self._text = text
        self._guidance = guidance
        self._use = completion.tool_use
        self._tools = None if self._use is None else _tool_format(self._use, text)
        self._reasoning = text.reasoning if completion.chat else None
        # A grammar binds the answer from its first token on, so the answer does not go on thinking.
        self._bound = completion.requests[0].sampling.guidance is not None

    async def applied(self, completion: Completion, tenant: Tenant) -> Completion:
        """Returns the request with the tools for the chat template, the markers to keep, the
        thinking budget if the model can have one, and room for calls in the grammar of the answer.
        Raises InvalidArgument if there is none.
        """
        use, reasoning = self._use, self._reasoning
        markers = self._tools.markers if self._tools else ()
        if reasoning is not None:
            markers += (reasoning.begin, reasoning.end)
        described = "" if use is None or use.mode == "none" else use.described
        options = replace(completion.chat_options, tools=described, markers=markers)
        if completion.thinking_tokens is not None and self._text.limits_thinking:
            completion = completion.with_sampling(thinking_token_budget=completion.thinking_tokens)
        guidance = completion.requests[0].sampling.guidance
        if use is not None and use.mode == "auto" and guidance is not None:
            field = completion.names.get("guidance", "")
            # Long schemas take tens of milliseconds.
            cost = len(guidance.source) + len(use.described)
            widened = await self._guidance.run(
                tenant, cost, lambda: self._with_calls(guidance, use, field)
            )
            completion = completion.with_sampling(guidance=widened)
        return replace(completion, chat_options=options)

    def _with_calls(self, answer: Guidance, use: ToolUse, field: str) -> Guidance:
        tools = self._tools
        found = None
        if tools is not None and tools.syntax is not None:
            if len(answer.source) > MAX_GUIDANCE:
                # Admission refuses it.
                return answer
            special = self._text.special_tokens(tools.markers)
            try:
                found = guidance_with_calls(answer, use, tools.syntax, special)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"{field} is not accepted: {error}", field=field) from error
        if found is None:
            raise InvalidArgument(
                f"{field} prescribes the answer in a way that leaves no room for this model's "
                "calls; give a JSON schema and a model whose calls are JSON, leave tools out, or "
                "set tool_choice to none",
                field=field,
            )
        return found

    def answers(self, request_id: str, streams: Sequence[Stream]) -> list[ChatAnswer]:
        """Returns the message of each choice, still empty."""
        return [
            ChatAnswer(
                f"{request_id}-{number}",
                self._parser(one.request.token_ids),
                parallel=self._use is None or self._use.parallel,
                calls_only=self._use is not None and self._use.mode == "required",
            )
            for number, one in enumerate(streams)
        ]

    def _parser(self, prompt: Sequence[int]) -> AnswerParser | None:
        tools = self._call_parser()
        if self._reasoning is None:
            return tools
        begun = not self._bound and self._text.thinks(prompt)
        return ReasoningSplitter(tools, self._reasoning, begun)

    def _call_parser(self) -> AnswerParser | None:
        use = self._use
        if use is not None and use.named is not None:
            return NamedCallParser(use.named)
        return None if use is None or self._tools is None else self._tools.open(use.tools)


def _tool_format(use: ToolUse, text: Text) -> ToolFormat | None:
    if use.mode == "none":
        return None
    if "tools" not in text.chat_template:
        raise InvalidArgument(
            "the chat template of this model takes no tools; leave tools out, or describe them in "
            "a message",
            field="tools",
        )
    if use.mode == "required":
        # The answer follows a grammar of its own.
        return TOOL_FORMATS["json"]
    if text.tool_format is None:
        raise InvalidArgument(
            "the format of this model's tool calls is unknown; set model.tool_format in the "
            "router's configuration, or leave tools out",
            field="tools",
        )
    return text.tool_format
