"""The threads of NIXL's agent in vLLM. Imports NIXL."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Longest sleep of NIXL's own thread, in microseconds.
_PROGRESS_US = 1000


@contextmanager
def resting_threads() -> Iterator[None]:
    """An agent that is made in this context has a thread that sleeps between its looks. NIXL's
    Python API sets no sleep, so the thread would take a whole core.

    On a CPU, vLLM's connector binds the thread that makes it to one core; the context takes that
    back, since kvrelay binds its threads itself.
    """
    bindings = importlib.import_module(_api().__module__).nixlBind
    made, allowed = bindings.nixlAgentConfig, os.sched_getaffinity(0)
    bindings.nixlAgentConfig = _resting(made)
    try:
        yield
    finally:
        bindings.nixlAgentConfig = made
        os.sched_setaffinity(0, allowed)


def _api() -> Any:
    return importlib.import_module("nixl._api").nixl_agent


def _resting(made: Any) -> Any:
    """A subclass of NIXL's configuration with another sleep."""

    class RestingConfig(made):  # type: ignore[misc]
        """Replaces the sleep that the Python API sets."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_US if name == "pthrDelay" else value)

    return RestingConfig
