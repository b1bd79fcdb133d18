"""Files that people write: configuration, scaling policies; and what Redis holds."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from fuzz.parser import Feed, Parser, refusal
from fuzz.spoil import garbled, json_bytes, spoiled, text

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_config, load_policy
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.tokens_file import TenantEntry, load_tokens
from kvrelay.errors import Cancelled, ConfigError
from kvrelay.state.registry import _PoolSize
from kvrelay.state.registry_codec import decode, encode
from kvrelay.types.control_plane import RouterLoad, ScalingDecision
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import WorkerInfo, WorkerLoad
from router.core.dispatcher import Dispatcher
from router.core.request import Request

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_WORDS = (
    "off",
    "on",
    "~",
    "---",
    "!!python/name:os.system",
    "&a ",
    "*a",
    "<<: ",
    "? ",
    "- ",
    "{",
    "}",
    "|",
    "\t",
    "010",
)


def _words(model: type[Any]) -> list[str]:
    return [*_WORDS, *(f"{name}: " for name in model.model_fields)]


_TOKENS = f"""tenants:
  - name: acme
    tokens_sha256: [{"0a" * 32}, {"1b" * 32}]
    roles: [client, admin]
    weight: 2.5
    max_running: 8
    requests_per_minute: 60
    tokens_per_minute: 100000
    min_priority: -3
  - {{name: other, tokens_sha256: [{"2c" * 32}]}}
"""


def yaml_text(goods: list[str], words: list[str], draw: random.Random) -> bytes:
    good = draw.choice(goods)
    if draw.random() < 0.5:
        tree = spoiled(draw, yaml.safe_load(good) or {}, [word.strip(": ") for word in words])
        try:
            good = yaml.safe_dump(tree, allow_unicode=True)
        except (yaml.YAMLError, RecursionError):
            good = str(tree)
    else:
        good = text(draw, good, words)
    data = good.encode(errors="surrogatepass")
    return garbled(draw, data) if draw.random() < 0.2 else data


@contextmanager
def reading(load: Callable[[Path], object], name: str) -> Iterator[Feed]:
    """Files by that name are loaded, or refused with their place."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)

        def feed(data: bytes) -> str:
            path.write_bytes(data)
            try:
                load(path)
            except ConfigError as error:
                return _printed(error)
            return "taken"

        yield feed


def _printed(error: ConfigError) -> str:
    assert error.message.isprintable(), f"not for a terminal: {error.message!r}"
    return refusal(error.message)


_WORKER = WorkerInfo(
    *("decode-0", "decode", 3, "ready", "127.0.0.1:7001", "demo", "00ff", 16, 4096, "host", 4096),
    load=WorkerLoad(running=2),
)
_VALUES = (
    _WORKER,
    RouterLoad("router-0", running=1, waiting=3, waiting_tokens=300, ttft_p95_ms=12.5),
    ScalingDecision(1.5, "decode", 1, 2, "queue_depth 9 is over 4"),
    _PoolSize(3),
)


def redis_value(draw: random.Random) -> bytes:
    """Begins with the number of its kind."""
    kind = draw.randrange(len(_VALUES))
    fields = [one.name for one in dataclasses.fields(_VALUES[kind])]
    return bytes([kind]) + json_bytes(
        draw, spoiled(draw, json.loads(encode(_VALUES[kind])), fields)
    )


@contextmanager
def decoding() -> Iterator[Feed]:
    def feed(data: bytes) -> str:
        kind = type(_VALUES[data[0]])
        try:
            value = decode(kind, data[1:])
        except ValueError as error:
            return refusal(ascii(error))  # as the registry logs it
        assert decode(kind, encode(value).encode()) == value, (
            "what is read can be written, and read again"
        )
        if isinstance(value, WorkerInfo):
            _use(value)
        return "taken"

    yield feed


def _use(worker: WorkerInfo) -> None:
    """As a router does, whose requests are none of the worker's."""
    dispatcher = Dispatcher(ClusterConfig())
    dispatcher.worker_found(_WORKER, 0.0)
    dispatcher.worker_found(replace(worker, worker_id="decode-1"), 0.0)
    dispatcher.workers_changed([worker], 1.0)
    request = Request("r", tuple(range(100)), SamplingParams(seed=0), 0.0, 60.0)
    dispatcher.submit(request, 2.0)
    dispatcher.tick(3.0)
    dispatcher.cancel("r", Cancelled("by the client"), 4.0)
    assert not dispatcher.unfinished


PARSERS = (
    Parser(
        "config",
        partial(
            yaml_text,
            [one.read_text() for one in sorted(CONFIGS.glob("*.yaml"))],
            _words(ClusterConfig),
        ),
        partial(reading, load_config, "cluster.yaml"),
    ),
    Parser(
        "policy",
        partial(
            yaml_text,
            [one.read_text() for one in sorted(CONFIGS.glob("autoscaling/*.yaml"))],
            _words(AutoscalingPolicy),
        ),
        partial(reading, load_policy, "policy.yaml"),
    ),
    Parser(
        "tokens",
        partial(yaml_text, [_TOKENS], _words(TenantEntry)),
        partial(reading, load_tokens, "tokens.yaml"),
    ),
    Parser("redis", redis_value, decoding),
)
