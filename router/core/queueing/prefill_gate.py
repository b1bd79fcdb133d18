"""Which prompts wait for a prefill worker, within one run of the queue."""

from __future__ import annotations

from router.core.path_policy import Assignment, Wait
from router.core.workers.worker_table import Workers

# Prompts that one run holds back at most. A look at a prompt hashes it, and the event loop must not
# stop for a whole queue of them.
MOST_HELD = 32


class PrefillGate:
    """Holds back prompts for which prefill workers are busy, and later prompts of the same tenant.
    If the workers take no further tenant, it holds back all prompts that come later.

    Requests that need no prefill worker pass.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._busy: set[str] = set()
        self._busy_for_all = False
        self._held = 0
        # Why the last prompt waits; None if none does.
        self.wait: Wait | None = None

    def busy_for(self, tenant: str) -> bool:
        """Whether a prompt of the tenant, or of everybody, waits already."""
        return self._busy_for_all or tenant in self._busy

    def holds(self, tenant: str, decision: Assignment | Wait) -> bool:
        """Whether a request of the tenant with this decision has to wait for a prefill worker."""
        if isinstance(decision, Assignment):
            held = bool(decision.prefill) and self.busy_for(tenant)
        else:
            held = decision.for_prefill
            if held:
                self._close(tenant, decision)
        self._held += held
        return held

    def _close(self, tenant: str, wait: Wait) -> None:
        self.wait = wait
        if self._workers.has_prompt_of(tenant):
            self._busy.add(tenant)
        else:
            self._busy_for_all = True

    @property
    def full(self) -> bool:
        """Whether the run has to stop and to go on later."""
        return self._held >= MOST_HELD
