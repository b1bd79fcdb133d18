"""The variables that a request sets in the chat template. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvrelay.errors import InvalidArgument, PermissionDenied
from router.api.http.json_writing import is_longer

# Arguments of the function that renders a template, which are not variables of the template.
_TEMPLATE_ARGUMENTS = {
    *("conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("return_assistant_tokens_mask", "continue_final_message", "compiled_template", "self"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
}
# Characters of JSON.
MAX_TEMPLATE_KWARGS = 4096


def template_kwargs(
    given: Mapping[str, Any] | None, effort: str | None = None, **more: object
) -> str:
    """Returns the variables as JSON; empty for none. `given` are the client's own, which win over
    `effort`, its reasoning effort, and over `more`. Raises PermissionDenied and InvalidArgument.
    """
    chosen = dict(given or {})
    if effort is not None:
        chosen.setdefault("reasoning_effort", effort)
    if effort == "none":
        chosen.setdefault("enable_thinking", False)
    chosen = more | chosen
    reserved = sorted(chosen.keys() & _TEMPLATE_ARGUMENTS)
    if reserved:
        raise PermissionDenied(
            f"chat_template_kwargs has {', '.join(reserved)}, which the router sets; leave it out",
            field="chat_template_kwargs",
        )
    if not chosen:
        return ""
    written = "" if is_longer(chosen, MAX_TEMPLATE_KWARGS) else json.dumps(chosen)
    if not 0 < len(written) <= MAX_TEMPLATE_KWARGS:
        raise InvalidArgument(
            f"chat_template_kwargs has more than {MAX_TEMPLATE_KWARGS} characters of JSON; send "
            "long texts as messages",
            field="chat_template_kwargs",
        )
    return written
