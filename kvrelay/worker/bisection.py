"""Whose fault it is when a step raises. Pure but for the call that runs a step again.

The parts of a batch that raised run again, halved until the culprits stand alone. The others of the
batch get what they would have got: a step writes the same KV to the same places each time, and
draws are keyed by (seed, position).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def most_runs_in_vain(size: int) -> int:
    """Runs of parts of a batch of `size`, none of which worked, after which the engine is taken to
    be broken.

    By then at least four items far from each other have failed alone, or every one of a small
    batch.
    """
    return 4 * (size - 1).bit_length() + 4


async def run_apart(
    items: Sequence[Item],
    error: Exception,
    run: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
) -> dict[Item, Outcome | Exception]:
    """What each of the items gave, or the exception with which it failed alone; all of them
    together raised `error`.

    One culprit among n costs at most 2 log2(n) runs. Where nothing works, the rest fails with the
    last exception after `most_runs_in_vain`.
    """
    outcomes: dict[Item, Outcome | Exception] = {}
    pending: list[Sequence[Item]] = []  # the next one last
    worked, runs = False, 0

    def blame(part: Sequence[Item], error: Exception) -> None:
        if len(part) > 1:
            middle = len(part) // 2
            pending.extend((part[middle:], part[:middle]))
            return
        outcomes[part[0]] = error
        if not worked:
            pending.sort(key=len)  # far from this one, which may have neighbours of its kind

    blame(items, error)
    while pending:
        if not worked and runs >= most_runs_in_vain(len(items)):
            outcomes |= dict.fromkeys((item for part in pending for item in part), error)
            break
        part = pending.pop()
        runs += 1
        try:
            found = await run(part)
        # - whatever the engine raises is its verdict on the part
        except Exception as one:  # noqa: BLE001
            error = one.with_traceback(None)  # its frames hold memory
            blame(part, error)
        else:
            worked = True
            outcomes |= zip(part, found, strict=True)
    return outcomes
