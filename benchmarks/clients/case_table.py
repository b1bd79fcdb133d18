"""The results of all cases, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

# Longest cell.
_WIDTH = 70


@dataclass(frozen=True, slots=True)
class CaseRow:
    """A case of a client, undisturbed and with a kill."""

    client: str
    version: str
    case: str
    # Tokens of the undisturbed run.
    tokens: int
    # Why it failed; empty if it did not.
    error: str
    # Whether a decode worker was killed during the answer, and a request moved to another one. None
    # if that was not tried.
    killed: bool | None = None
    # Why the run with a kill failed; empty if it did not.
    kill_error: str = ""
    # Whether its answer was that of the undisturbed run.
    same: bool = False

    @property
    def passed(self) -> bool:
        """Whether the case passed undisturbed, and with a kill if that was tried."""
        return not self.error and (self.killed is None or (self.killed and self.same))

    @property
    def undisturbed(self) -> str:
        """The result without a kill."""
        return _last_line(self.error) or "passed"

    @property
    def with_a_kill(self) -> str:
        """The result with a kill."""
        if self.killed is None:
            return ""
        if self.kill_error:
            return _last_line(self.kill_error)
        if not self.killed:
            return "the answer ended before the kill"
        return "same answer" if self.same else "ANOTHER ANSWER"


def case_table(rows: Sequence[CaseRow]) -> Table:
    """Returns a table with a line for each case."""
    table = Table()
    for column in ("client", "version", "case"):
        table.add_column(column)
    table.add_column("tokens", justify="right")
    for column in ("undisturbed", "with a kill"):
        table.add_column(column)
    last = ""
    for row in rows:
        if row.client != last:
            table.add_section()
        head = (row.client, row.version) if row.client != last else ("", "")
        table.add_row(*head, row.case, str(row.tokens), row.undisturbed, row.with_a_kill)
        last = row.client
    return table


def _last_line(error: str) -> str:
    lines = error.strip().splitlines()
    return lines[-1][:_WIDTH] if lines else ""
