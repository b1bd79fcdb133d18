"""Reads YAML configuration. Every problem is one ConfigError that begins with FILE:LINE:
key.path.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.file_name import shown_name, why_unreadable
from kvrelay.config.model_sections import ModelSections
from kvrelay.config.pools import KvConfig, PoolKvConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.section import BadValue
from kvrelay.config.security import SecurityConfig
from kvrelay.config.special_file import is_special
from kvrelay.config.yaml_file import KeyPath, YamlFile, key_text
from kvrelay.errors import ConfigError, InvalidArgument
from kvrelay.planning.profile import Profile
from kvrelay.planning.quantity import plain
from kvrelay.types.workers import POOLS

Config = TypeVar("Config", bound=BaseModel)
Sections = TypeVar("Sections", bound=ModelSections)
KvSection = TypeVar("KvSection", KvConfig, PoolKvConfig)

# Characters of a profile; a longer file is none.
_MAX_PROFILE = 2**20
# Seconds of a step; less is a mistake.
_LEAST_STEP_S = 1e-9
# Characters of an error.
_MAX_MESSAGE = 400
# Errors of one file, beside the first.
_MAX_OTHERS = 9

# Command-line options that override a key. Errors name the option that the user typed.
_OPTIONS = {
    "model.path": "--model",
    "prefill.replicas": "--prefill",
    "decode.replicas": "--decode",
    "listen.grpc": "--grpc-port",
    "listen.http": "--http-port",
    "listen.admin": "--admin-port",
}


def load_config(path: Path | None, overrides: Mapping[str, object] | None = None) -> ClusterConfig:
    """Returns the defaults, overridden by the file, overridden by `overrides` (dotted keys). File
    paths in the result are absolute.

    In a file of several models, the override of `model.path` is the name of the only one to load.

    Raises ConfigError for a bad file, a bad override, or a bad autoscaling policy file.
    """
    overrides = overrides or {}
    file = YamlFile.empty() if path is None else YamlFile.read(path, may_be_pipe=True)
    only = None
    if isinstance(models := file.data.get("models"), dict) and models:
        only, overrides = _for_one_model(list(models), overrides)
    for dotted, value in overrides.items():
        _set(file.data, dotted.split("."), value)
    if isinstance(models, dict) and models:
        defaults = {key: file.data[key] for key in ModelSections.model_fields if key in file.data}
        file.data["models"] = {key: _over(defaults, one) for key, one in models.items()}
    config = validated(
        ClusterConfig, file, {tuple(dotted.split(".")): dotted for dotted in overrides}
    )
    folder = Path() if path is None else path.parent
    security = SecurityConfig.model_validate(_absolute(config.security.model_dump(), folder))
    from_file = path is not None and "autoscaling" not in overrides

    def resolved(sections: Sections, at: KeyPath) -> Sections:
        found = _with_folder(sections, folder)
        policy = _policy(found, folder if from_file else Path(), file, from_file, at)
        found = found.model_copy(update={"autoscaling": policy})
        size = file.written((*at, "decode", "replicas"))
        is_option = key_text(size) in overrides
        _check_somebody_decodes(
            found, f"{'--decode' if is_option else file.where(size)}: {key_text(size)}"
        )
        return found

    named = {key: resolved(one, ("models", key)) for key, one in config.models.items()}
    config = resolved(config.model_copy(update={"security": security, "models": named}), ())
    return config if only is None else config.only(only)


def load_one_model(
    path: Path | None, overrides: Mapping[str, object] | None = None
) -> ClusterConfig:
    """Returns `load_config` for a command about one model. Raises ConfigError also for several."""
    models = YamlFile.empty().data if path is None else YamlFile.read(path).data.get("models")
    if models and "model.path" not in (overrides or {}):
        raise ConfigError(
            f"{path}: models: the file has several models, and this command is about one; name it "
            f"with --model: {', '.join(map(str, models))}"
        )
    return load_config(path, overrides)


def _for_one_model(
    models: list[str], overrides: Mapping[str, object]
) -> tuple[str | None, dict[str, object]]:
    """Returns the only model to load, None for all, and the overrides of a file with `models`.
    Raises ConfigError for another model, and for an override without a model.
    """
    names = ", ".join(models)
    only = overrides.get("model.path")
    if only is not None and only not in models:
        raise ConfigError(f"--model: {only!s:.100} is not in the file, whose models are {names}")
    moved: dict[str, object] = {}
    for dotted, value in overrides.items():
        if dotted.partition(".")[0] not in ModelSections.model_fields:
            moved[dotted] = value
        elif only is None:
            raise ConfigError(
                f"{_OPTIONS.get(dotted, dotted)}: the file has the models {names}; name one with "
                "--model, or leave the option out"
            )
        elif dotted != "model.path":
            moved[f"models.{only}.{dotted}"] = value
    return None if only is None else str(only), moved


def _over(defaults: Any, own: Any) -> Any:
    """Returns `own` with what only `defaults` has, in mappings at every depth."""
    if not isinstance(defaults, dict) or not isinstance(own, dict):
        return own
    return {**defaults, **{key: _over(defaults.get(key), one) for key, one in own.items()}}


def _policy(
    sections: ModelSections, folder: Path, file: YamlFile, from_file: bool, at: KeyPath
) -> str | None:
    """Returns the absolute path of the autoscaling policy, once it has been read. `at`: where the
    sections are in the file. Raises ConfigError.
    """
    if sections.autoscaling is None:
        return None
    policy = (folder / sections.autoscaling).resolve()
    try:
        rules = load_policy(policy)
    except ConfigError as error:
        # isfile returns False also for a path that no file can have.
        if os.path.isfile(policy):
            raise
        loc = file.written((*at, "autoscaling"))
        where = f"{file.where(loc)}: {key_text(loc)}" if from_file else "option: autoscaling"
        raise ConfigError(f"{where}: {error.message}"[:_MAX_MESSAGE]) from None
    if (rules.rebalance or rules.standby) and (bound := sections.bound_to_pools) is not None:
        key, what = bound
        given = sections.prefill.model_fields_set
        loc = file.written((*at, "prefill" if key in given else "decode", key))
        cause, without = (
            ("rebalance: true, which moves workers between the pools", "rebalance: false")
            if rules.rebalance
            else (f"standby: {rules.standby}, which adds workers to either pool", "standby: 0")
        )
        remedy = "engine: native" if key == "engine" else f"{key} to one value in both pools"
        raise ConfigError(
            f"{file.where(loc)}: {key_text(loc)}: {what}, and {policy} has {cause} and keeps "
            f"their processes and weights; set {remedy}, or set {without}"
        )
    return str(policy)


def _check_somebody_decodes(sections: ModelSections, where: str) -> None:
    """Raises ConfigError for an empty decode pool that no policy would fill. `where`: the option or
    the line and key of the pool's size.
    """
    if sections.decode.replicas:
        return
    if sections.autoscaling is None or not load_policy(Path(sections.autoscaling)).sleeps:
        raise ConfigError(
            f"{where}: 0 would leave nobody to generate tokens; set 1 or more, or an autoscaling "
            "policy with decode.min_replicas: 0"
        )


def _with_folder(config: Sections, folder: Path) -> Sections:
    """Resolves the paths of adapters and tiers relative to `folder`."""
    serve = tuple(
        one.model_copy(update={"path": str((folder / one.path).absolute())})
        for one in config.adapters.serve
    )
    adapters = config.adapters.model_copy(update={"serve": serve})

    def resolved(kv: KvSection) -> KvSection:
        if not kv.tiers:
            return kv
        tiers = tuple(
            tier.model_copy(update={"path": str((folder / tier.path).absolute())})
            if tier.path
            else tier
            for tier in kv.tiers
        )
        return kv.model_copy(update={"tiers": tiers})

    pools: dict[str, object] = {
        name: config.pool(name).model_copy(update={"kv": resolved(config.pool(name).kv)})
        for name in POOLS
    }
    return config.model_copy(update={"adapters": adapters, "kv": resolved(config.kv), **pools})


def load_policy(path: Path) -> AutoscalingPolicy:
    """Reads a policy file, and checks its profile. Raises ConfigError."""
    file = YamlFile.read(path)
    policy = validated(AutoscalingPolicy, file, {})
    if policy.profile is None:
        return policy
    policy = policy.model_copy(update={"profile": str(path.parent / policy.profile)})
    try:
        load_profile(policy)
    except ConfigError as error:
        raise ConfigError(f"{file.where(('profile',))}: profile: {error.message}") from None
    return policy


def load_profile(policy: AutoscalingPolicy) -> Profile | None:
    """Returns the step costs that the policy names, None if it names none. Raises ConfigError."""
    if policy.profile is None:
        return None
    name = shown_name(policy.profile)
    try:
        if os.path.isdir(policy.profile) or is_special(policy.profile):
            raise ConfigError(f"{name} is not a file")
        with open(policy.profile, encoding="utf-8") as file:
            profile = Profile.parse(file.read(_MAX_PROFILE))
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} cannot be read: {why_unreadable(error)}; write it with `kvrelay profile "
            "--json FILE`"
        ) from None
    except InvalidArgument as error:
        raise ConfigError(f"{name}: {error.message}") from None
    if min(profile.costs.prefill_s(1), profile.costs.decode_s(1, 1)) < _LEAST_STEP_S:
        raise ConfigError(f"{name}: its steps take no time; write it again with `kvrelay profile`")
    return profile


def _absolute(paths: Any, folder: Path) -> Any:
    """Resolves nested mappings of paths relative to `folder`."""
    match paths:
        case dict():
            return {key: _absolute(inner, folder) for key, inner in paths.items()}
        case str():
            return str((folder / paths).absolute())
    return paths


def _set(data: dict[str, Any], keys: list[str], value: object) -> None:
    """Sets a nested key. Does nothing if the file has a value that is not a mapping on the way; the
    validation of the file reports that value.
    """
    for key in keys[:-1]:
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        data = inner
    data[keys[-1]] = value


def validated(
    kind: type[Config],
    file: YamlFile,
    overrides: Mapping[KeyPath, str],
    *,
    show_values: bool = True,
) -> Config:
    """Validates the file against the model `kind`. Raises a ConfigError for the first bad value,
    with a note for each other one. With show_values=False, the error contains no values of the
    file, for files whose values must not appear in logs.
    """
    try:
        # Validation goes through JSON. Its strict mode accepts lists for tuples, but neither
        # booleans nor strings for numbers.
        return kind.model_validate_json(json.dumps(file.data, default=str), strict=True)
    except ValidationError as error:
        found: dict[KeyPath, ErrorDetails] = {}
        for one in _causes(error.errors(include_url=False), kind):
            found.setdefault(file.written(_loc(one)), one)
        first, *others = (
            _problem(loc, _explain(found[loc], kind, show_values), file, overrides.get(loc))
            for loc in sorted(found, key=file.line)
        )
        problem = ConfigError(first)
        for other in others[:_MAX_OTHERS]:
            problem.add_note(f"also {other}")
        raise problem from None


def _causes(errors: list[ErrorDetails], kind: type[BaseModel]) -> list[ErrorDetails]:
    """Returns the errors without those for missing keys that are there under a similar name."""
    meant = {
        (*one["loc"][:-1], near)
        for one in errors
        if one["type"] == "extra_forbidden"
        for near in _near(one["loc"], kind)
    }
    return [one for one in errors if one["type"] != "missing" or one["loc"] not in meant]


def _problem(loc: KeyPath, message: str, file: YamlFile, dotted: str | None) -> str:
    """Returns the line for one bad value. dotted: the override that set it, if one did."""
    where = file.where(loc) if dotted is None else _OPTIONS.get(dotted, "option")
    parts = (where, key_text(loc), message[:_MAX_MESSAGE])
    return ": ".join(part for part in parts if part)


def _loc(error: ErrorDetails) -> KeyPath:
    """Returns the location of the bad value. A validator of a whole mapping knows the location more
    precisely than pydantic.
    """
    raised = error.get("ctx", {}).get("error")
    return error["loc"] + (raised.at if isinstance(raised, BadValue) else ())


def _explain(error: ErrorDetails, kind: type[BaseModel], show_values: bool) -> str:
    """Returns what is wrong with a value and what is allowed."""
    given, context = error["input"], error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            allowed = _keys_at(kind, error["loc"][:-1])
            nearest = _near(error["loc"], kind)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            return f"unknown key; {hint}allowed are {', '.join(allowed)}"
        case "value_error":
            return str(context["error"])
        case "literal_error":
            text = f"must be {context['expected']}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            sign = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
            ((relation, bound),) = context.items()
            text = f"must be {sign[relation]} {plain(bound, 15)}"
        case "string_type" if error["loc"][0] == "listen":
            text = "must be HOST:PORT, such as 127.0.0.1:8000"
        case "string_too_short":
            return "is empty; give a path, or leave the key out"
        case "finite_number":
            text = "must be a finite number"
        case "too_long":
            # pydantic does not count a mapping to its end.
            number = context["actual_length"] or f"over {context['max_length']}"
            return f"has {number} entries; allowed are {context['max_length']}"
        case "missing":
            return f"is missing; the keys here are {', '.join(_keys_at(kind, error['loc'][:-1]))}"
        case "model_type":
            text = f"must be a mapping with the keys {', '.join(_keys_at(kind, error['loc']))}"
        case code:
            expected = {
                "bool_type": "true or false",
                "int_type": "a whole number",
                "float_type": "a number",
                "string_type": "a string",
                "tuple_type": "a list",
                "dict_type": "a mapping",
                "none_required": "null",
            }
            text = f"must be {expected[code]}" if code in expected else error["msg"]
    if not show_values:
        return text
    hint = "; YAML reads a bare on, off, yes or no as a boolean" if isinstance(given, bool) else ""
    if error["type"] == "literal_error":
        allowed = re.findall("'([^']*)'", context["expected"])
        nearest = difflib.get_close_matches(str(given), allowed, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else hint
    return f"{text}, not {_shown(given)}{hint}"


def _near(loc: KeyPath, kind: type[BaseModel]) -> list[str]:
    """Returns the key that an unknown key may stand for, if there is one."""
    return difflib.get_close_matches(str(loc[-1]), _keys_at(kind, loc[:-1]), n=1)


def _shown(value: object) -> str:
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            text = json.dumps(value, default=str)
            return text if len(text) <= 60 else text[:57] + "..."


def _keys_at(kind: type[BaseModel], loc: KeyPath) -> list[str]:
    """Returns the keys of the mapping at `loc` in a configuration of that kind."""
    section = kind
    for part in loc:
        # A mapping by name has keys of the user's own.
        if isinstance(part, str) and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the model in `Model`, `Model | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_in(inner))), None)
