"""The trial of guidance in a child process before any other process compiles it.

A grammar can overflow the compiler's stack, or keep it busy for minutes in spite of llguidance's
limits. In the child process that costs half a second of processor time, and at most the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

from kvrelay.engine.sampling.grammar import CPU_S, SMALL, refusal
from kvrelay.errors import InvalidArgument, KvRelayError, Unavailable
from kvrelay.types.requests import Guidance

_CHILD = "kvrelay.engine.sampling.grammar_process"
# Time to start and to answer on a busy machine. The child's processor time is limited more tightly.
_START_S, _ANSWER_S = 60.0, 20.0
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class GrammarTrial:
    """Tries out guidance, one at a time. Safe to call from any thread, which it blocks.

    The process starts on first use or in `warm_up`, and again after a grammar has ended it.
    """

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        eos = ",".join(map(str, sorted(eos_token_ids)))
        self._command = [sys.executable, "-P", "-m", _CHILD, folder, str(vocab_size), eos]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def warm_up(self) -> None:
        """Starts the process, so that no request waits for that. If it fails, the requests with
        guidance show the reason.
        """
        with contextlib.suppress(KvRelayError):
            self.check(SMALL)

    def check(self, guidance: Guidance) -> None:
        """Raises InvalidArgument with the reason if the guidance is not accepted, and Unavailable
        if the process does not start or does not answer.
        """
        request = json.dumps({"kind": guidance.kind, "source": guidance.source})
        with self._lock:
            try:
                for _ in range(2):
                    reason = self._ask(self._started(), request.encode() + b"\n")
                    if reason is not None:
                        break
                else:
                    raise Unavailable(
                        "the process that tries out guidance was killed twice; the machine may "
                        "have no memory left"
                    )
            except BaseException:
                # The pipe may still contain an answer, which the next call would take for its own.
                self._end()
                raise
        if reason:
            raise InvalidArgument(reason, field="guidance")

    def close(self) -> None:
        """Ends the process. A check in progress fails."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise Unavailable("guidance is not accepted any more, because the process shuts down")
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        try:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # A crash would write there, as often as clients like.
                stderr=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
                # Ctrl-C at the terminal is for the parent.
                start_new_session=True,
            )
        except OSError as error:
            raise Unavailable(
                f"the process that tries out guidance does not start: {error.strerror}; retry later"
            ) from error
        unable = _line(process, _START_S)
        if unable is None:
            raise Unavailable("the process that tries out guidance does not start; retry later")
        if unable:
            raise InvalidArgument(unable, field="guidance")
        return process

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> str | None:
        """Returns why the guidance is not accepted, or nothing; None if the process was killed."""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        reason = _line(process, _ANSWER_S)
        if reason is not None:
            return reason
        code = process.wait()
        if code == -signal.SIGVTALRM:
            why = f"it takes more than {CPU_S:g} s to compile; use fewer or shorter rules"
        elif self._closed:
            raise Unavailable("guidance is not accepted any more, because the process shuts down")
        elif code in (-signal.SIGKILL, -signal.SIGTERM):
            return None
        else:
            why = "compiling it ends the process; use fewer nested rules"
        raise refusal(why)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # Closes the pipes and reaps the process.
            process.communicate()


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> str | None:
    """Reads an answer of the child. None if it has ended. Kills it after the timeout and raises
    Unavailable.
    """
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    # With many connections, the pipe's number is beyond what select takes.
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    while not line.endswith(b"\n"):
        left = max(0.0, deadline - time.monotonic())
        if not ready.poll(left * 1000):
            raise Unavailable(
                f"the process that tries out guidance gave no answer within {timeout_s:g} s; "
                "retry later",
                retry_after_s=1.0,
            )
        if not (part := os.read(process.stdout.fileno(), 4096)):
            return None
        line += part
    return str(json.loads(line))
