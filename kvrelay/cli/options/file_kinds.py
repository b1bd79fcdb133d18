"""The kinds of files that commands read: what a file is, and which option takes it.

A command that fails on a file of another kind would name a key or a line of it, which does not say
that the file is at the wrong option.
"""

from __future__ import annotations

import json
import os
from typing import Any

from kvrelay.types.workers import POOLS

# Characters that are read of a file.
_MOST = 2**20
# Kind: what it is called, and where it belongs.
_KINDS = {
    "configuration": (
        "a configuration of a cluster",
        "give it with -c to a command that has it, such as `kvrelay serve`",
    ),
    "policy": (
        "an autoscaling policy",
        "name it as `autoscaling` in the configuration, or with `kvrelay simulate --autoscaling`",
    ),
    "tenants": ("a file of tenants", "name it as `security.tokens_file` in the configuration"),
    "token": ("a token", "give it with --token-file"),
    "pem": ("a PEM file", "give it with --tls-ca, --tls-cert or --tls-key"),
    "model": ("the config.json of a model", "give it to `kvrelay plan`, or its folder as MODEL"),
    "profile": ("the profile of a worker", "give it to `kvrelay simulate --profile`"),
    "costs": ("step costs", "give it to `kvrelay plan --costs`"),
    "report": (
        "the report of a load test",
        "give it to `kvrelay loadtest report`, `kvrelay plan --record` or "
        "`kvrelay simulate --calibrate`",
    ),
    "sweep": ("the report of a sweep", "give it to `kvrelay loadtest report`"),
    "plan": ("the answer of `kvrelay plan --json`", "no command reads it"),
    "simulation": ("the report of `kvrelay simulate --sweep`", "no command reads it"),
    "trace": ("a trace", "give it with --trace"),
    "metrics": ("a table of metrics", "give it to `kvrelay autoscale explain --metrics`"),
}
# Commands that write files of a kind.
_WRITERS = {
    "profile": "kvrelay profile --json FILE",
    "costs": "kvrelay plan MODEL --step-costs FILE",
    "report": "kvrelay loadtest run --json FILE",
}
# Kinds that an option or argument takes, by its name, and by command where the name is not enough.
_TAKES = {
    "config": ("configuration",),
    "autoscaling": ("policy",),
    "policy": ("policy",),
    "profile": ("profile", "costs"),
    "costs": ("costs",),
    "trace": ("trace",),
    "record": ("report",),
    "calibrate": ("report",),
    "explain metrics": ("report", "metrics", "trace"),
    "plan model": ("model",),
    "plan draft": ("model",),
    "report file": ("report", "sweep"),
    "first": ("report",),
    "second": ("report",),
    "token_file": ("token",),
    "tls_ca": ("pem",),
    "tls_cert": ("pem",),
    "tls_key": ("pem",),
}


def misplaced_file(context: Any) -> str | None:
    """Returns a sentence about an option of the command whose file is of a kind that it does not
    take, or does not exist and could be written by a command; None if there is no such option.
    """
    for param in context.command.params:
        name = param.name
        takes = _TAKES.get(f"{context.command.name} {name}", _TAKES.get(name))
        value = context.params.get(name)
        if takes is None or value is None:
            continue
        # A repeatable option has a list.
        for one in value if isinstance(value, list | tuple) else (value,):
            if (sentence := _misplaced(one, param, takes)) is not None:
                return sentence
    return None


def _misplaced(value: Any, param: Any, takes: tuple[str, ...]) -> str | None:
    if takes[0] in _WRITERS and not os.path.exists(value):
        return f"{value}: No such file; `{_WRITERS[takes[0]]}` writes {_KINDS[takes[0]][0]}"
    kind = kind_of(value) if os.path.isfile(value) else None
    if kind is None or kind in takes:
        return None
    what, place = _KINDS[kind]
    is_option = param.param_type_name == "option"
    taker = max(param.opts, key=len) if is_option else param.metavar or param.name.upper()
    wanted = " or ".join(_KINDS[one][0] for one in takes)
    return f"{value} is {what}, and {taker} takes {wanted}; {place}"


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the kind of a file; None if it has the form of none."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_MOST)
    except (OSError, UnicodeDecodeError):
        return None
    first = text.lstrip().partition("\n")[0].strip()
    if first.startswith("-----BEGIN "):
        return "pem"
    if first.startswith("kvr_"):
        return "token"
    if first.startswith("seconds,"):
        return "metrics"
    if first == "TIMESTAMP,ContextTokens,GeneratedTokens" or '"input_length"' in first:
        return "trace"
    if text.lstrip().startswith("{"):
        return _kind_of_json(text)
    return _kind_of_yaml(text)


def _kind_of_json(text: str) -> str | None:
    # A long report is not parsed for its format, which comes first.
    for name, kind in _formats().items():
        if f'"format": "{name}"' in text[:200]:
            return kind
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return "model" if {"model_type", "architectures"} & set(document) else None


def _formats() -> dict[str, str]:
    """Returns the formats that kvrelay's own JSON files name, with the kind of each."""
    from kvrelay.loadtest.report import report_file
    from kvrelay.planning import plan_json, profile, step_cost_model
    from kvrelay.simulation import sweep

    return {
        profile.FORMAT: "profile",
        step_cost_model.FORMAT: "costs",
        report_file.FORMAT: "report",
        report_file.SWEEP_FORMAT: "sweep",
        plan_json.FORMAT: "plan",
        sweep.FORMAT: "simulation",
    }


def _kind_of_yaml(text: str) -> str | None:
    import yaml

    from kvrelay.config.autoscaling_policy import AutoscalingPolicy, PoolPolicy
    from kvrelay.config.pools import DecodeConfig, PrefillConfig
    from kvrelay.config.schema import ClusterConfig

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    if "tenants" in document:
        return "tenants"
    configuration = _keys(ClusterConfig, prefill=PrefillConfig, decode=DecodeConfig)
    policy = _keys(AutoscalingPolicy, prefill=PoolPolicy, decode=PoolPolicy)
    found = set(document)
    for pool in POOLS:
        inner = document.get(pool)
        found |= {f"{pool}.{key}" for key in (inner if isinstance(inner, dict) else ())}
    # Keys of both, such as prefill, tell nothing.
    fits = {"configuration": found <= configuration, "policy": found <= policy}
    return next((kind for kind in fits if fits[kind]), None) if sum(fits.values()) == 1 else None


def _keys(kind: Any, **pools: Any) -> set[str]:
    """Returns the keys that a schema allows, and those of its pools."""
    inner = {f"{name}.{key}" for name, pool in pools.items() for key in pool.model_fields}
    return {*kind.model_fields, *inner}
