"""The body of an answer of /tokenize. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from router.api.http.encoding import to_json

_TOKENS_AT_ONCE = 512
# Cost of an encoded and spelled token, for router.runtime.loop_slices.
_TOKEN_COST = 32


def tokenized_steps(
    tokens: Sequence[int], max_model_len: int, spell: Callable[[Sequence[int]], list[str]] | None
) -> Generator[int, None, str]:
    """Writes the body of /tokenize's response, in the steps of router.runtime.loop_slices. With
    `spell`, the body also has each token's spelling.
    """
    lists: dict[str, list[str]] = {
        name: [] for name in ("tokens", *([] if spell is None else ["token_strs"]))
    }
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        part = tokens[start : start + _TOKENS_AT_ONCE]
        lists["tokens"].append(to_json(part)[1:-1])
        if spell is not None:
            lists["token_strs"].append(to_json(spell(part))[1:-1])
        yield len(part) * _TOKEN_COST
    said = "".join(f',"{name}":[{",".join(parts)}]' for name, parts in lists.items())
    return f'{{"count":{len(tokens)},"max_model_len":{max_model_len}{said}}}'
