"""An engine in a process of its own, from this side."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from ctypes.util import find_library
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.process.child import bound_to_parent

_READY_WITHIN_S = 900.0  # an engine may compile its model first
_ANSWER_WITHIN_S = 900.0
_END_WITHIN_S = 10.0

KVRELAY = (sys.executable, "-m", "kvrelay.bench.engines.kvrelay_engine")


def vllm_command(python: str) -> tuple[str, ...]:
    """`python` is the absolute path of the interpreter that has vLLM."""
    script = Path(__file__).parent / "engines" / "vllm_engine.py"
    return ("/usr/bin/env", f"LD_PRELOAD={vllm_preload(python)}", python, str(script))


def vllm_preload(python: str) -> str:
    """What vLLM's manual asks for on a CPU, where it is installed: the OpenMP that comes with it,
    and tcmalloc.
    """
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    tcmalloc = find_library("tcmalloc_minimal")
    return ":".join(
        [*([str(openmp)] if openmp.exists() else []), *([tcmalloc] if tcmalloc else [])]
    )


class EngineProcess:
    """Speaks the lines of `engines/loop.py`. Use as a context manager.

    Every method raises Unavailable for an engine that ended or failed, with the last line that it
    printed, and DeadlineExceeded for one that does not answer.
    """

    def __init__(self, command: tuple[str, ...], settings: dict[str, Any]) -> None:
        """`command` begins with an absolute path. Returns when the engine has generated a token,
        `ready_seconds` after its process was started.
        """
        # - closed in __exit__
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        started = time.perf_counter()
        self._process = subprocess.Popen(
            bound_to_parent(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.facts = self._ask(settings, _READY_WITHIN_S)
        except BaseException:
            self._end()
            raise
        self.ready_seconds = time.perf_counter() - started

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    def prefill(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        return float(self._ask({"do": "prefill", "prompt": prompt})["seconds"])

    def open(self, prompts: list[list[int]]) -> None:
        self._ask({"do": "open", "prompts": prompts})

    def decode(self, steps: int) -> float:
        """Seconds for that many steps of the open batch."""
        return float(self._ask({"do": "decode", "steps": steps})["seconds"])

    def close(self) -> None:
        self._ask({"do": "close"})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _ask(self, order: dict[str, Any], within_s: float = _ANSWER_WITHIN_S) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise Unavailable(self._obituary()) from error
        # One answer for each order, so nothing waits in the file's own buffer. (`select` takes no
        # large descriptors.)
        answered = select.poll()
        answered.register(self._process.stdout, select.POLLIN)
        if not answered.poll(within_s * 1000):
            raise DeadlineExceeded(f"{self._process.args!r} did not answer within {within_s:g} s")
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise Unavailable(self._obituary()) from error
        if "error" in answer:
            raise Unavailable(f"the engine failed: {answer['error']}")
        return dict(answer)

    def _obituary(self) -> str:
        self._log.seek(0)
        lines = self._log.read().split("\n")
        last = next(
            (line.strip() for line in reversed(lines) if line.strip()), "it printed nothing"
        )
        return f"the engine's process ended without an answer: {last}"

    def _end(self) -> None:
        """Its stdin's end tells it to go; it is killed if it stays."""
        try:
            self._process.communicate(timeout=_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        except BrokenPipeError:
            self._process.wait(_END_WITHIN_S)
        self._log.close()
