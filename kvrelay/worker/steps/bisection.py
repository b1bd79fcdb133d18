"""Finds the sequences that make a step raise. Pure but for the call that runs a step again.

The parts of a batch that raised run again, halved until each culprit stands alone. The other
sequences get their normal result: a step writes the same KV to the same places each time, and
sampling is keyed by (seed, position).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


def most_runs_in_vain(size: int) -> int:
    """Number of failed runs, with none that succeeded, after which the engine counts as broken, for
    a batch of `size`.

    By then at least four distant items have failed alone, or every item of a small batch.
    """
    return 4 * (size - 1).bit_length() + 4


async def run_apart(
    items: Sequence[Item],
    error: Exception,
    run: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
) -> dict[Item, Outcome | Exception]:
    """Runs the parts of a batch that raised `error`; returns each item's outcome, or the exception
    with which it failed alone.

    One culprit among n items costs at most 2 log2(n) runs. If no run succeeds, the remaining items
    fail with the last exception after `most_runs_in_vain` runs.
    """
    outcomes: dict[Item, Outcome | Exception] = {}
    # The next part is the last element.
    pending: list[Sequence[Item]] = []
    worked, runs = False, 0

    def blame(part: Sequence[Item], error: Exception) -> None:
        if len(part) > 1:
            middle = len(part) // 2
            pending.extend((part[middle:], part[:middle]))
            return
        outcomes[part[0]] = error
        if not worked:
            # The next part is far from this item, since neighbouring items may share its fault.
            pending.sort(key=len)

    blame(items, error)
    while pending:
        if not worked and runs >= most_runs_in_vain(len(items)):
            outcomes |= dict.fromkeys((item for part in pending for item in part), error)
            break
        part = pending.pop()
        runs += 1
        try:
            found = await run(part)
        # Any exception of the engine counts as the part's failure.
        except Exception as raised:  # noqa: BLE001
            # The frames of the traceback hold memory.
            error = raised.with_traceback(None)
            blame(part, error)
        else:
            worked = True
            outcomes |= zip(part, found, strict=True)
    return outcomes
