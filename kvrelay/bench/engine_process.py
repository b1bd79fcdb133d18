"""Runs an engine in a separate process. This module is the parent's side."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from ctypes.util import find_library
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.process.child import bound_to_parent

# Long, because an engine may compile its model first.
_READY_WITHIN_S = 900.0
_ANSWER_WITHIN_S = 900.0
_END_WITHIN_S = 10.0

KVRELAY = (sys.executable, "-m", "kvrelay.bench.engines.kvrelay_engine")


def vllm_command(python: str) -> tuple[str, ...]:
    """Returns the command for vLLM. `python` is the absolute path of the interpreter that has
    vLLM.
    """
    script = Path(__file__).parent / "engines" / "vllm_engine.py"
    return ("/usr/bin/env", f"LD_PRELOAD={vllm_preload(python)}", python, str(script))


def vllm_preload(python: str) -> str:
    """Returns the libraries that vLLM's manual recommends to preload on a CPU, where they are
    installed: the OpenMP that vLLM ships, and tcmalloc.
    """
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    tcmalloc = find_library("tcmalloc_minimal")
    return ":".join(
        [*([str(openmp)] if openmp.exists() else []), *([tcmalloc] if tcmalloc else [])]
    )


def native_engine(
    model: str,
    *,
    cores: Sequence[int],
    chunk_tokens: int,
    max_model_len: int,
    kv_bytes: int,
    device: str = "cpu",
    weights: str = "auto",
) -> EngineProcess:
    """Starts kvrelay's engine as a worker loads it, with a thread on each core.

    model: a folder. weights: a format, or auto for the model's own dtype.
    """
    settings = {
        "model": model,
        "shape": None,
        "device": device,
        "dtype": "auto",
        "threads": len(cores),
        "cores": cores,
        "chunk_tokens": chunk_tokens,
        "max_model_len": max_model_len,
        "kv_bytes": kv_bytes,
        "load": {} if weights == "auto" else {"weights": weights},
    }
    return EngineProcess(KVRELAY, settings)


class EngineProcess:
    """Implements the line protocol of `engines/loop.py`. Use as a context manager.

    Every method raises Unavailable if the engine ended or failed, with the last line that the
    engine printed. Every method raises DeadlineExceeded if the engine does not answer.
    """

    def __init__(self, command: tuple[str, ...], settings: dict[str, Any]) -> None:
        """Starts the engine and returns after the engine has generated a token. `ready_seconds` is
        the time from the process start to that token. `command` begins with an absolute path.
        """
        # `__exit__` closes the file.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        started = time.perf_counter()
        self._process = subprocess.Popen(
            bound_to_parent(*command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # The script of a peer imports a module beside it.
            env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        )
        try:
            self.facts = self._ask(settings, _READY_WITHIN_S)
        except BaseException:
            self._end()
            raise
        self.ready_seconds = time.perf_counter() - started

    @property
    def name(self) -> str:
        """Name and version, as the engine reports them."""
        return str(self.facts["name"])

    def prefill(self, prompt: list[int]) -> float:
        """Prefills one prompt; returns seconds to its first token."""
        return float(self._ask({"do": "prefill", "prompt": prompt})["seconds"])

    def open(self, prompts: list[list[int]]) -> None:
        """Prefills a batch of prompts and keeps it open for `decode`."""
        self._ask({"do": "open", "prompts": prompts})

    def decode(self, steps: int) -> float:
        """Runs `steps` decode steps on the open batch; returns seconds."""
        return float(self._ask({"do": "decode", "steps": steps})["seconds"])

    def close(self) -> None:
        """Drops the open batch."""
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
        # Each order gets one answer, so no second line can wait in the file's buffer. `select` does
        # not accept large descriptors, so this is `poll`.
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
        """Closes the engine's stdin, which tells the engine to exit. Kills the engine if it does
        not exit in time.
        """
        try:
            self._process.communicate(timeout=_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        except BrokenPipeError:
            self._process.wait(_END_WITHIN_S)
        self._log.close()
