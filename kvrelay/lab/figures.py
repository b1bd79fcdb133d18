"""What the experiments measured. All times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.types.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Steps of one engine on one core."""

    # Format of the weights, as `kvrelay status` shows it.
    weights: str
    layout: KvLayout
    vocab_size: int
    # Longest sequence, in tokens.
    model_len: int
    # Time to the first token, by the tokens of the prompt.
    prefill: Mapping[int, float]
    # Time of a decode step of one sequence, by the tokens before the step.
    position: Mapping[int, float]
    # Time of a decode step, by the number of sequences.
    batch: Mapping[int, float]
    # Tokens of each sequence in `batch`.
    batch_context: int


@dataclass(frozen=True, slots=True)
class NeighbourFigures:
    """Streams of one cluster, first alone and then beside another client's long prompts."""

    form: str
    # (time since the first stream, gap since the token before) of each token.
    gaps: tuple[tuple[float, float], ...]
    # Time at which the first prompt was sent.
    prompts_from: float
    # TTFT of the prompts, ascending.
    ttft: tuple[float, ...]

    @property
    def alone(self) -> list[float]:
        """The gaps before the prompts, ascending."""
        return sorted(gap for at, gap in self.gaps if at < self.prompts_from)

    @property
    def beside(self) -> list[float]:
        """The gaps that began beside the prompts, ascending."""
        return sorted(gap for at, gap in self.gaps if at - gap >= self.prompts_from)


@dataclass(frozen=True, slots=True)
class LabFigures:
    """All experiments. The reason is kept where one could not run."""

    model: str
    machine: str
    # Bytes of the model's files.
    weight_bytes: int
    engine: EngineFigures
    int8: EngineFigures | str
    # Tokens of each of the neighbour's prompts, and the forms of the cluster.
    prompt_tokens: int
    neighbour: tuple[NeighbourFigures, ...] | str
    # What other programs that ran meanwhile did; empty without any.
    disturbance: str = ""
