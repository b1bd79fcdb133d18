"""Ctrl-C in a blocking client, wherever it arrives."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from support.scripted_router import ScriptedRouter, serving

from kvrelay.client import Client


class InterruptAt:
    """Interrupts the main thread, as Ctrl-C does, when a function of Python begins or one of C
    returns. Python handles the signal soon after that moment. A context manager.

    An exception of the profile function itself would be raised where Python handles no signals, and
    can crash Python 3.11.
    """

    def __init__(self, moment: int) -> None:
        self._left = moment
        self._ended = False
        self.raised = False

    def __enter__(self) -> InterruptAt:
        # The collector calls functions of Python, such as Hypothesis's, wherever it runs.
        gc.disable()
        self._before = signal.signal(signal.SIGINT, self._handle)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        sys.setprofile(None)
        signal.signal(signal.SIGINT, self._before)
        gc.enable()

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and self._left >= 0 and not self._ended:
            self._left -= 1
            if self._left < 0:
                _thread.interrupt_main()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ended or self.raised:
            return
        if frame is not None and frame.f_code is InterruptAt._see.__code__:
            _thread.interrupt_main()
            return
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
