"""Ctrl-C in a blocking client, wherever it arrives."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest
from support.scripted_router import ScriptedRouter, serving

from kvrelay.client import Client


class InterruptAt:
    """Raises KeyboardInterrupt at one of the moments at which Python handles signals: when a
    function of Python begins, and when one of C returns. A context manager.
    """

    def __init__(self, moment: int) -> None:
        self._left = moment
        self.raised = False

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code is InterruptAt.__exit__.__code__:
            return
        self._left -= 1
        if self._left < 0:
            self.raised = True
            raise KeyboardInterrupt


def answers(client: Client) -> bool:
    return len(client.generate("p", max_tokens=2, timeout=20).result().token_ids) == 2


def answers_in_a_thread(client: Client) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(answers(client)), daemon=True)
    thread.start()
    thread.join(30)
    return found == [True]


# A call of gRPC that was not made whole.
@pytest.mark.filterwarnings(
    "ignore:.*(_Rendezvous|Channel|_ChannelCallState).__del__:pytest.PytestUnraisableExceptionWarning"
)
# A hang is one way to fail.
@pytest.mark.timeout(90)
@pytest.mark.parametrize("first", range(4))
def test_a_client_answers_after_an_interrupt_at_any_moment(first: int) -> None:
    with serving(ScriptedRouter()) as target:
        for moment in range(first, 10_000, 4):
            with Client(target) as client:
                stream = client.generate("p", max_tokens=3)
                interrupt = InterruptAt(moment)
                try:
                    with interrupt:
                        stream.result()
                except KeyboardInterrupt:
                    stream.cancel()
                assert answers(client), moment
                assert answers_in_a_thread(client), moment
            if not interrupt.raised:
                break
    assert moment > 200, "the answer was not read under the profile"
