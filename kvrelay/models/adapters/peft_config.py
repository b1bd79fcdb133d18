"""The settings of a LoRA adapter: adapter_config.json as PEFT writes it.

A setting that would change the result and is not supported is refused. So is an unknown setting
that is not off, because it may belong to a method of a later release of PEFT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvrelay.errors import ModelRefused

# Characters of one pattern, and patterns of one adapter.
MAX_PATTERN = 200
MAX_PATTERNS = 256
# Patterns with a quantifier. A match of one takes up to about 10 ms, in which no other thread runs.
MAX_QUANTIFIED = 16
MAX_TARGETS = 4096
MAX_ALPHA = 1e6

# Settings that do not change the result of a trained adapter.
_HARMLESS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}
_REASONS = {
    "use_dora": "DoRA scales each output by a norm of the merged weights",
    "modules_to_save": "the adapter replaces whole layers, which all requests share",
    "lora_bias": "the adapter adds biases",
    "trainable_token_indices": "the adapter changes embeddings, which all requests share",
    "target_parameters": "the adapter changes parameters that are not those of a linear layer",
    "layer_replication": "the adapter changes the number of layers",
    "alora_invocation_tokens": "the adapter begins in the middle of a prompt",
    "use_qalora": "QALoRA pools the inputs of its layers",
}
# Initialisations that leave the weights of the base model as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_QUANTIFIERS = "*+{"
_PATTERN_RULES = (
    f"allowed are {MAX_PATTERN} characters, two of * + {{, two of ?, and none of them after a "
    "bracket that closes a group"
)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The settings that the result depends on."""

    rank: int
    alpha: float
    # Rank-stabilised scaling (Kalajdzievski, 2023): alpha / sqrt(rank) instead of alpha / rank.
    use_rslora: bool
    # Module names, or None if a regular expression or `all-linear` chose the modules. The tensors
    # then say which they are.
    targets: frozenset[str] | None
    # Whether each module that `targets` names has to have tensors.
    complete: bool
    # Patterns of module names, with the rank or alpha of these modules.
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()

    @classmethod
    def parse(cls, value: Mapping[str, Any], where: str) -> PeftConfig:
        """Checks the content of adapter_config.json. Raises ModelRefused, whose message starts with
        `where`.
        """
        try:
            return cls._parse(value)
        except ValueError as error:
            raise ModelRefused(f"{where}: {error}") from None

    @classmethod
    def _parse(cls, value: Mapping[str, Any]) -> PeftConfig:
        _check_method(value)
        targets = value.get("target_modules")
        listed: frozenset[str] | None = None
        if isinstance(targets, list) and targets:
            if len(targets) > MAX_TARGETS or not all(_is_name(one) for one in targets):
                raise ValueError(f"target_modules is no list of at most {MAX_TARGETS} module names")
            listed = frozenset(targets)
        elif not _is_name(targets):
            raise ValueError(
                f"target_modules is {targets!r:.80}; allowed are a list of module names, a regular "
                "expression, and all-linear"
            )
        return cls(
            rank=_rank("r", value.get("r")),
            alpha=_alpha("lora_alpha", value.get("lora_alpha")),
            use_rslora=_flag(value, "use_rslora"),
            targets=listed,
            complete=not any(
                value.get(name) for name in ("layers_to_transform", "exclude_modules")
            ),
            rank_pattern=tuple(
                (pattern, _rank("rank_pattern", one))
                for pattern, one in _patterns(value, "rank_pattern")
            ),
            alpha_pattern=tuple(
                (pattern, _alpha("alpha_pattern", one))
                for pattern, one in _patterns(value, "alpha_pattern")
            ),
        )

    def targets_module(self, module: str) -> bool:
        """Whether `targets` names the module, as PEFT matches it: by its whole name or its end."""
        if self.targets is None or module in self.targets:
            return True
        starts = (at + 1 for at, character in enumerate(module) if character == ".")
        return any(module[start:] in self.targets for start in starts)

    def rank_of(self, module: str) -> int:
        """The rank of a module's factors."""
        return _matched(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of a module's update: alpha / rank, or alpha / sqrt(rank) with use_rslora."""
        rank, alpha = self.rank_of(module), _matched(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def largest_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *(rank for _, rank in self.rank_pattern), 1)


def _matched(patterns: tuple[tuple[re.Pattern[str], T], ...], module: str, default: T) -> T:
    """The value of the first pattern that matches the module's name or its end."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _check_method(value: Mapping[str, Any]) -> None:
    """Raises ValueError for anything but plain LoRA of a causal language model."""
    if value.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {value.get('peft_type')!r:.40}; only LORA is supported")
    if value.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"task_type is {value.get('task_type')!r:.40}; only CAUSAL_LM is supported"
        )
    if value.get("bias", "none") != "none":
        raise ValueError(
            f"bias is {value.get('bias')!r:.40}, so the adapter changes biases; only none is "
            "supported; train with bias none, or merge the adapter into its base model"
        )
    for name, setting in value.items():
        if name in _HARMLESS or setting in (None, False, "", [], {}):
            continue
        reason = _REASONS.get(name, "this release does not know the setting")
        raise ValueError(
            f"{name!r:.60} is not supported: {reason}; merge the adapter into its base model"
        )
    start = value.get("init_lora_weights", True)
    if not any(start is one or (isinstance(one, str) and start == one) for one in _PLAIN_STARTS):
        raise ValueError(
            f"init_lora_weights is {start!r:.40}, which changes the weights of the base model; "
            "convert the adapter to plain LoRA with PEFT, or merge it into its base model"
        )
    _flag(value, "fan_in_fan_out")


def _flag(value: Mapping[str, Any], name: str) -> bool:
    found = value.get(name)
    if found is None or isinstance(found, bool):
        return bool(found)
    raise ValueError(f"{name} is {found!r:.40}; allowed are true and false")


def _rank(name: str, found: object) -> int:
    if type(found) is int and 0 < found < 2**31:
        return found
    raise ValueError(f"{name} is {found!r:.40}; allowed is a whole number above 0")


def _alpha(name: str, found: object) -> float:
    if type(found) in (int, float) and 0 < abs(found) <= MAX_ALPHA:  # type: ignore[arg-type]
        return float(found)  # type: ignore[arg-type]
    raise ValueError(f"{name} is {found!r:.40}; allowed is a number up to {MAX_ALPHA:g}, not 0")


def _is_name(found: object) -> bool:
    return isinstance(found, str) and 0 < len(found) <= 4096


def _patterns(value: Mapping[str, Any], name: str) -> list[tuple[re.Pattern[str], object]]:
    found = value.get(name) or {}
    if not isinstance(found, dict) or len(found) > MAX_PATTERNS:
        raise ValueError(f"{name} is no mapping of at most {MAX_PATTERNS} patterns")
    quantified = sum(any(one in pattern for one in (*_QUANTIFIERS, "?")) for pattern in found)
    if quantified > MAX_QUANTIFIED:
        raise ValueError(
            f"{name} has {quantified} patterns with * + {{ or ?; allowed are {MAX_QUANTIFIED}; "
            "write the names of the modules out"
        )
    return [(_compiled(name, pattern), one) for pattern, one in found.items()]


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    """The pattern as PEFT matches it. Raises ValueError for a regular expression that may take
    exponential time, since each module's name is matched against it.
    """
    repeats = sum(pattern.count(one) for one in _QUANTIFIERS)
    nested = any(f"){one}" in pattern for one in (*_QUANTIFIERS, "?"))
    if len(pattern) > MAX_PATTERN or repeats > 2 or pattern.count("?") > 2 or nested:
        raise ValueError(f"{name} has the pattern {pattern!r:.60}; {_PATTERN_RULES}")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{name} has the pattern {pattern!r:.60}: {error}") from None
