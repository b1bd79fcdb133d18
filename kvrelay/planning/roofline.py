"""Bounds of the time of a step, from operations, bytes and the rates of a device. Pure.

Source of the model: Williams et al., "Roofline" (2009), section 3. Operations of a transformer:
Kaplan et al., "Scaling Laws for Neural Language Models" (2020), section 2.1 and table 1.
Tensor parallelism: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvrelay.planning.device import Device, Efficiency
from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.model_memory import ModelMemory, matrix_parameters
from kvrelay.planning.step_cost_model import StepCostModel

# Layers by values per pair of tokens, K and V together, and window in tokens.
_Widths = dict[tuple[int, int], int]
Bound = Literal["compute", "bandwidth"]
# Bytes of an activation between devices.
_ACTIVATION_BYTES = 2
# Latency of one all-reduce between the devices of a host, in seconds. An assumption.
_ALL_REDUCE_S = 10e-6
# Rate at which weights come from a disk, in bytes per second, and the time of a role change. Both
# are assumptions, for the simulation only.
_DISK = 2e9
_ROLE_CHANGE_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one step does."""

    operations: float
    # Read from and written to the memory of the device.
    moved_bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in operations per byte."""
        return self.operations / self.moved_bytes if self.moved_bytes else 0.0

    def plus(self, other: Work) -> Work:
        """Returns the work of both."""
        return Work(self.operations + other.operations, self.moved_bytes + other.moved_bytes)


# Without slots, since the sums over the layers are computed once.
@dataclass(frozen=True)
class Roofline:
    """Step times of one worker: a model on `degree` devices of a kind."""

    memory: ModelMemory
    kv: KvSize
    device: Device
    efficiency: Efficiency
    # Tensor parallel degree.
    degree: int = 1

    @property
    def operations_per_s(self) -> float:
        """Operations per second of the matrix products that all devices reach."""
        dtype = self.memory.weight_dtype
        return self.degree * self.device.rate(dtype) * self.efficiency.compute

    @property
    def attention_operations_per_s(self) -> float:
        """Operations per second of the attention that all devices reach. Weights of fewer bits do
        not make it faster: queries and probabilities are bf16.
        """
        rate = min(self.device.rate("bf16"), self.device.rate(self.memory.weight_dtype))
        return self.degree * rate * self.efficiency.compute

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that the memories of all devices reach."""
        return self.degree * self.device.bandwidth * self.efficiency.bandwidth

    @property
    def ridge(self) -> float:
        """Arithmetic intensity above which operations bound a step, in operations per byte."""
        return self.operations_per_s / self.bytes_per_s

    def prefill_parts(self, tokens: float, before: float = 0.0) -> tuple[Work, Work]:
        """Returns the work of a prefill step of `tokens` tokens after `before` tokens: of the
        matrices, and of the attention.

        Operations: 2 per parameter and token, and 2 heads (k_dim + v_dim) per pair of tokens and
        layer. Bytes: weights; earlier and new KV.
        """
        operations = self._attention_operations(tokens, before)
        return self.matrices(tokens), Work(operations, self.kv.sequence_bytes(before + tokens))

    def decode_parts(self, batch: float, context_tokens: float) -> tuple[Work, Work]:
        """Returns the work of a decode step of `batch` sequences with `context_tokens` tokens of KV
        together: of the matrices, and of the attention.
        """
        each = context_tokens / batch if batch else 0.0
        before = max(0.0, each - 1)
        operations = batch * self._attention_operations(1, before, self._decode_widths)
        moved = batch * self.kv.sequence_bytes(each)
        return self.matrices(batch), Work(operations, moved)

    def matrices(self, tokens: float) -> Work:
        """Returns the work of all matrix products of a step of `tokens` tokens."""
        return Work(2.0 * self._parameters * tokens, self.memory.read_bytes(tokens))

    def seconds(self, matrices: Work, *attention: Work) -> float:
        """Returns the time of kernels that run one after the other, each as long as the larger of
        its bounds. Matrix products and attention are such kernels (Zhu et al., "NanoFlow", 2024,
        section 3).
        """
        bounds = (matrices.operations / self.operations_per_s, self._moved_s(matrices))
        return max(bounds) + sum(map(self._attention_s, attention))

    def _attention_s(self, work: Work) -> float:
        return max(work.operations / self.attention_operations_per_s, self._moved_s(work))

    def _moved_s(self, work: Work) -> float:
        return work.moved_bytes / self.bytes_per_s

    def bound(self, work: Work) -> Bound:
        """Returns which of both bounds is larger."""
        return "compute" if work.intensity > self.ridge else "bandwidth"

    def prefill_s(self, tokens: float, before: float = 0.0) -> float:
        """Returns the seconds of a step that prefills `tokens` tokens after `before` tokens."""
        return self.seconds(*self.prefill_parts(tokens, before)) + self._all_reduce_s(tokens)

    def prompt_s(self, tokens: int, chunk_tokens: int, before: int = 0) -> float:
        """Returns the seconds of all chunks of a prompt. The attention counts as one kernel."""
        full, rest = divmod(tokens, chunk_tokens)
        _, attention = self.prefill_parts(tokens, before)
        total = self._attention_s(attention)
        for size, number in ((chunk_tokens, full), (rest, 1 if rest else 0)):
            if number:
                total += number * (self.seconds(self.matrices(size)) + self._all_reduce_s(size))
        return total

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Returns the seconds of a decode step."""
        return self.seconds(*self.decode_parts(batch, context_tokens)) + self._all_reduce_s(batch)

    def mixed_s(self, tokens: float, before: float, batch: float, context_tokens: float) -> float:
        """Returns the seconds of a step that prefills a chunk beside a decode batch. Both share the
        matrix products, which read the weights once.
        """
        _, prompt = self.prefill_parts(tokens, before)
        _, answers = self.decode_parts(batch, context_tokens)
        both = self.matrices(tokens + batch)
        return self.seconds(both, prompt, answers) + self._all_reduce_s(tokens + batch)

    def handoff_s(self, num_bytes: float) -> float:
        """Returns the seconds of a transfer to another host. Each device has its own adapter."""
        return num_bytes / self.handoff_rate

    @property
    def handoff_rate(self) -> float:
        """Bytes per second of a transfer to another host."""
        return self.degree * self.device.network * self.efficiency.link

    def linear(self, batch: int, context: int, chunk_tokens: int) -> StepCostModel:
        """Returns linear step costs that equal these at a decode step of `batch` sequences of
        `context` tokens, and at prefill steps of `chunk_tokens` tokens.

        Bases and slopes add up, where a step takes the larger of its bounds; so steps of other
        sizes are overestimated, by a factor of 2 at most.
        """
        chunk = self.prefill_s(chunk_tokens)
        # Attention of a token to one earlier token.
        pair = self._attention_operations(1, 0) / self.attention_operations_per_s
        read = self.memory.read_bytes(batch) / self.bytes_per_s + self._all_reduce_s(0)
        kv = self.kv.bytes_per_old_token or self.kv.bytes_per_token
        context_token = kv / self.bytes_per_s
        step = self.decode_s(batch, batch * context)
        rest = max(0.0, step - read - context_token * batch * context)
        return StepCostModel(
            prefill_base_s=0.0,
            prefill_token_s=max(0.0, chunk / chunk_tokens - pair * (chunk_tokens + 1) / 2),
            prefill_token_context_s=pair,
            decode_base_s=read,
            decode_sequence_s=rest / batch,
            decode_context_token_s=context_token,
            handoff_base_s=0.0,
            handoff_byte_s=1.0 / self.handoff_rate,
            start_s=self.memory.weight_bytes / _DISK,
            role_change_s=_ROLE_CHANGE_S,
            kind="analytic",
            model=self.memory.shape.model_type,
            device=f"{self.degree} x {self.device.full_name}"[:500],
            source="roofline of published peak figures times assumed efficiencies; start-up and "
            "role change are assumptions",
        )

    @cached_property
    def _parameters(self) -> int:
        return matrix_parameters(self.memory.shape)

    def _attention_operations(
        self, tokens: float, before: float, widths: _Widths | None = None
    ) -> float:
        """Returns the operations of the attention of `tokens` tokens after `before` tokens."""
        return sum(
            2.0 * count * self.memory.shape.heads * width * _pairs(tokens, before, window)
            for (width, window), count in (widths or self._widths).items()
        )

    @cached_property
    def _widths(self) -> _Widths:
        """Counts the layers by (k_dim + v_dim, window)."""
        # kvrelay's engine attends to latent vectors in every step, vLLM only in decode steps.
        if self.kv.form == "native":
            return self._decode_widths
        return Counter(
            (one.kv.k_dim + one.kv.v_dim, one.window)
            for one in self.memory.shape.layers
            if one.kv is not None
        )

    @cached_property
    def _decode_widths(self) -> _Widths:
        """The same of a decode step. Over latent vectors, each head multiplies with the whole
        vector and sums what K and V are computed from, since the matrices that expand it are
        absorbed into the query and the output: DeepSeek-V2 (2024), section 2.1.2.
        """
        return Counter(
            (
                one.latent + one.latent_rank
                if self.kv.keeps_latent(one)
                else one.kv.k_dim + one.kv.v_dim,
                one.window,
            )
            for one in self.memory.shape.layers
            if one.kv is not None
        )

    def _all_reduce_s(self, tokens: float) -> float:
        """Returns the seconds of two all-reduces per layer, each of which moves 2 (n - 1) / n times
        the hidden states (Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms", 2009).
        """
        if self.degree == 1:
            return 0.0
        shape, degree = self.memory.shape, self.degree
        moved = 2 * (degree - 1) / degree * tokens * shape.hidden * _ACTIVATION_BYTES
        each = _ALL_REDUCE_S + moved / (self.device.link * self.efficiency.link)
        return 2 * len(shape.layers) * each


def _pairs(tokens: float, before: float, window: int) -> float:
    """Returns the pairs of a token and one that it attends to: each of `tokens` tokens after
    `before` tokens sees itself, those before it, and at most `window` together. A window of 0 is
    none.
    """
    if window and before + tokens > window:
        growing = max(0.0, window - before)
        return _pairs(growing, before, 0) + (tokens - growing) * window
    return tokens * before + tokens * (tokens + 1) / 2
