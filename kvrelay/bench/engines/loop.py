"""The main loop of an engine's process. It reads orders from stdin, one JSON object per line, and
answers each order with one JSON object on stdout.

The Python of another project runs this module too, so it imports only the standard library.

The first order contains the settings: model, or shape if there is no checkpoint; device, threads,
cores, max_model_len, kv_bytes, and further settings that the engine supports. The answer follows
when the engine has generated its first token. Then, until stdin ends:

    {"do": "prefill", "prompt": [ids]}     -> {"seconds": to the prompt's first token}
    {"do": "open", "prompts": [[ids], …]}  -> {}         prefills a batch of sequences
    {"do": "decode", "steps": n}           -> {"seconds": for n steps of the whole batch}
    {"do": "close"}                        -> {}         drops the batch

An order that fails is answered with {"error": reason} and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """One model on given cores. The engine reuses nothing from earlier prompts."""

    def facts(self) -> dict[str, Any]:
        """Returns a description of the engine and its settings. The key `name` is required."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Prefills one prompt; returns seconds to its first token."""
        ...

    def open(self, prompts: list[list[int]]) -> None:
        """Prefills a batch of prompts and keeps it open for `decode`."""
        ...

    def decode(self, steps: int) -> float:
        """Runs `steps` decode steps on the open batch; returns seconds."""
        ...

    def close(self) -> None:
        """Drops the open batch."""
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answers orders until stdin ends. Output of the engine's libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        settings = json.loads(sys.stdin.readline())
        os.sched_setaffinity(0, settings["cores"])
        engine = load(settings)
        engine.prefill([0])
        answer(engine.facts())
        for line in sys.stdin:
            answer(_obey(engine, json.loads(line)))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


def _obey(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    match order["do"]:
        case "prefill":
            return {"seconds": engine.prefill(order["prompt"])}
        case "open":
            engine.open(order["prompts"])
            return {}
        case "decode":
            return {"seconds": engine.decode(order["steps"])}
        case "close":
            engine.close()
            return {}
    raise ValueError(f"unknown order {order['do']!r}")
