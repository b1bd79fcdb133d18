"""OpenAI's answers to /v1/completions and /v1/chat/completions. Pure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from io import StringIO
from json.encoder import encode_basestring_ascii
from typing import Any

from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Usage
from kvrelay.wire.inference import GenerateResponse
from router.api.http.account import account
from router.api.http.chat.answer import ChatAnswer, Parts
from router.api.http.dialects.dialect import Opened
from router.api.http.dialects.openai.errors import error_body
from router.api.http.encoding import event, to_json
from router.api.http.logprobs import LogprobsText
from router.frontend.answer_parsers.events import CallArguments, CallStarted, Content, Reasoning

Json = dict[str, Any]
DONE = "data: [DONE]\n\n"


class OpenAiShape:
    """Writes the bodies of one answer. The members that all chunks of a stream share are encoded
    once. See AnswerShape.
    """

    def __init__(self, opened: Opened) -> None:
        self._choices = opened.choices
        self._completion = completion = opened.choices.completion
        self._head = opened.head
        self._echoes = opened.echoes
        self._answers = opened.answers
        before = to_json(self._body([], chunk=True)).removesuffix("]}")
        self._before = f'data: {before}{{"index":'
        usage = completion.include_usage and not completion.continuous_usage
        self._after = ',"usage":null' if usage else ""
        # Whether a chunk without text says something.
        self._counts_chunks = completion.return_token_ids or completion.continuous_usage
        # By choice.
        self._fingerprints: dict[int, str] = {}
        self._ends: dict[int, GenerateResponse] = {}
        # By choice, for a whole answer.
        self._parts = [Parts() for _ in opened.answers]
        self._texts = [StringIO() for _ in opened.answers]

    def begin(self) -> str:
        """See AnswerShape."""
        return ""

    def chunk(self, index: int, response: GenerateResponse, logprobs: LogprobsText | None) -> str:
        """See AnswerShape."""
        completion = self._completion
        reason: str | None = response.finish_reason
        if completion.chat:
            delta = self._delta(self._answers[index], response)
            reason = self._finish_reason(index, response)
            if not (delta or reason or logprobs or self._counts_chunks):
                # The tokens are hidden marks of a call, or the beginning of text that follows.
                return ""
            said = f'"delta":{{{delta}}}'
        else:
            begin = self._echoes[index] if completion.echo and response.index == 0 else ""
            said = f'"text":{encode_basestring_ascii(begin + response.text)}'
        ids = f',"token_ids":{to_json(response.token_ids)}' if completion.return_token_ids else ""
        finish = "null" if reason is None else f'"{reason}"'
        scores = "null" if logprobs is None else logprobs.written()
        told = self._after
        if completion.continuous_usage:
            usage = self._usage([self._choices.usage(index, response)], 1, [self._answers[index]])
            told = f',"usage":{to_json(usage)}'
        if response.system_fingerprint:
            self._fingerprints[index] = (
                f',"system_fingerprint":{to_json(response.system_fingerprint)}'
            )
        told += self._fingerprints.get(index, "")
        if response.finish_reason is not None:
            self._ends[index] = response
            if len(self._ends) == len(self._answers) and not completion.include_usage:
                told += f',"kvrelay":{to_json(account(self._ended))}'
        choice = f'{index},{said},"logprobs":{scores},"finish_reason":{finish}{ids}'
        return f"{self._before}{choice}}}]{told}}}\n\n"

    def end(self) -> str:
        """See AnswerShape."""
        if not self._completion.include_usage:
            return DONE
        usage = self._usage(_usages(self._ended), self._completion.n, self._answers)
        more = {"usage": usage, "kvrelay": account(self._ended)}
        return event(self._body([], chunk=True) | more) + DONE

    def failed(self, error: KvRelayError) -> str:
        """See AnswerShape."""
        return event(error_body(error)) + DONE

    def hear(self, index: int, response: GenerateResponse) -> None:
        """See AnswerShape."""
        if self._completion.chat:
            self._parts[index].add(self._answers[index].hear(response))
        else:
            self._texts[index].write(response.text)

    def whole(
        self, answers: Sequence[GenerateResponse], logprobs: Sequence[LogprobsText | None]
    ) -> Generator[int, None, list[bytes]]:
        """See AnswerShape."""
        usage = self._usage(_usages(answers), self._completion.n, self._answers)
        fingerprint = {"system_fingerprint": answers[0].system_fingerprint or None}
        rest = fingerprint | {"usage": usage, "kvrelay": account(answers)}
        body = to_json(self._body([], chunk=False) | rest)
        before, _, after = body.partition('"choices":[]')
        parts = [f'{before}"choices":['.encode()]
        for index, (answer, one) in enumerate(zip(answers, logprobs, strict=True)):
            choice: Json = {"index": index, "finish_reason": answer.finish_reason}
            if self._completion.chat:
                choice["message"] = self._message(index)
                choice["finish_reason"] = self._finish_reason(index, answer)
            else:
                text = self._texts[index].getvalue()
                choice["text"] = self._echoes[index] + text if self._completion.echo else text
            if self._completion.return_token_ids:
                choice["token_ids"] = list(answer.token_ids)
            scores = "null" if one is None else one.written()
            comma = "," if index else ""
            parts.append(f'{comma}{to_json(choice)[:-1]},"logprobs":{scores}}}'.encode())
            yield len(parts[-1])
        return [*parts, f"]{after}".encode()]

    def _delta(self, answer: ChatAnswer, response: GenerateResponse) -> str:
        """Returns the JSON members of the delta for the next response."""
        members = ['"role":"assistant"'] if response.index == 0 else []
        if answer.plain:
            if response.text or response.token_ids:
                members.append(f'"content":{encode_basestring_ascii(response.text)}')
            return ",".join(members)
        # The delta of a call that began earlier has no name.
        calls: dict[int, tuple[str | None, list[str]]] = {}
        texts: dict[str, list[str]] = {"reasoning_content": [], "content": []}
        for said in answer.hear(response):
            match said:
                case Content(text):
                    texts["content"].append(text)
                case Reasoning(text):
                    texts["reasoning_content"].append(text)
                case CallStarted(index, name):
                    calls[index] = name, []
                case CallArguments(index, text):
                    calls.setdefault(index, (None, []))[1].append(text)
        for name, pieces in texts.items():
            if pieces:
                members.append(f'"{name}":{encode_basestring_ascii("".join(pieces))}')
        if calls:
            written = (
                _call_delta(answer, index, name, "".join(arguments))
                for index, (name, arguments) in calls.items()
            )
            members.append(f'"tool_calls":[{",".join(written)}]')
        return ",".join(members)

    def _message(self, index: int) -> Json:
        """Returns the message of a whole answer."""
        answer, parts = self._answers[index], self._parts[index]
        content = parts.texts(Content)
        message: Json = {"role": "assistant", "content": content}
        if reasoning := parts.texts(Reasoning):
            message["reasoning_content"] = reasoning
        if parts.calls:
            message["tool_calls"] = [
                {
                    "id": answer.call_id(one.index),
                    "type": "function",
                    "function": {"name": one.name, "arguments": one.text},
                }
                for one in parts.calls
            ]
        if parts.calls or answer.calls_only:
            message["content"] = content or None
        return message

    def _finish_reason(self, index: int, response: GenerateResponse) -> str | None:
        """Returns the finish reason of a response whose text has been parsed. A call of the
        function that the client named is not the model's reason to end.
        """
        use = self._completion.tool_use
        forced = use is not None and use.named is not None
        if response.finish_reason == "stop" and self._answers[index].called and not forced:
            return "tool_calls"
        return response.finish_reason

    @property
    def _ended(self) -> list[GenerateResponse]:
        """The last response of each choice."""
        return [self._ends[one] for one in sorted(self._ends)]

    def _usage(self, usages: Sequence[Usage], n: int, answers: Sequence[ChatAnswer]) -> Json:
        found = usage_body(usages, n)
        if self._completion.chat:
            tokens = sum(one.reasoning_tokens for one in answers)
            found["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return found

    def _body(self, choices: list[Json], chunk: bool) -> Json:
        name = "text_completion"
        if self._completion.chat:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        head = self._head
        return {
            "id": head.id,
            "object": name,
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }


def _call_delta(answer: ChatAnswer, index: int, name: str | None, arguments: str) -> str:
    function = f'"arguments":{encode_basestring_ascii(arguments)}'
    if name is None:
        return f'{{"index":{index},"function":{{{function}}}}}'
    function = f'"name":{encode_basestring_ascii(name)},{function}'
    head = f'"id":"{answer.call_id(index)}","type":"function"'
    return f'{{"index":{index},{head},"function":{{{function}}}}}'


def _usages(answers: Sequence[GenerateResponse]) -> list[Usage]:
    return [one.usage for one in answers if one.usage is not None]


def usage_body(usages: Sequence[Usage], n: int) -> Json:
    """Returns the usage of all choices. `usages` has `n` consecutive entries per prompt, and each
    prompt counts once.
    """
    prompts = usages[::n]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }
