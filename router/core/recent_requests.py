"""The tokens of the requests that have left their workers lately, for the autoscaler. Pure."""

from __future__ import annotations

from collections import deque

from kvrelay.types.control_plane import RECENT, RequestShape

# Requests that are kept, and for how long, in seconds.
_MOST = 1024
_LONGEST_S = 600.0


class RecentRequests:
    """Owns the shapes of the last requests that had workers, whether they finished or not."""

    def __init__(self) -> None:
        # Requests that have begun on a worker so far.
        self.begun = 0
        # Oldest first.
        self._shapes: deque[tuple[float, RequestShape]] = deque(maxlen=_MOST)

    def ended(self, prompt: int, cached: int, output: int, now: float) -> None:
        """Adds a request that has ended: tokens of its prompt, those that were cached, and new ones
        of its answer. As far as is known, the prompt of a request without an answer was not
        computed.
        """
        cached = cached if output else prompt
        self._shapes.append((now, RequestShape(prompt, cached, output)))

    def sample(self, now: float) -> tuple[RequestShape, ...]:
        """Returns the kept shapes; of more than RECENT, an even sample over the sorted ones, so
        that rare large requests count as often as they come.
        """
        shapes = self._shapes
        while len(shapes) > RECENT and shapes[0][0] < now - _LONGEST_S:
            shapes.popleft()
        found = [shape for _, shape in shapes]
        if len(found) <= RECENT:
            return tuple(found)
        found.sort(key=lambda one: (one.prompt_tokens + one.output_tokens, one.output_tokens))
        return tuple(found[(2 * n + 1) * len(found) // (2 * RECENT)] for n in range(RECENT))
