"""The adapters that a model has loaded."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrelay.engine.adapters.low_rank import LowRank, Site, Update
from kvrelay.engine.adapters.step_adapters import StepAdapters
from kvrelay.engine.model.adapter_sites import Layer, attach, find_layers, overflows
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.native.low_rank import panels_of
from kvrelay.errors import ModelRefused
from kvrelay.models.adapters.adapter_files import AdapterFiles, StoredTensor, missing_modules

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory, checked against the model."""

    adapter_id: str
    # By layer name.
    factors: dict[str, LowRank]

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(one.a.nbytes + one.b.nbytes for one in self.factors.values())


class AdapterTable:
    """The adapters of one model, by id. `prepare` may run in any thread; `install` and `remove`
    only between steps, in the thread that runs them. Any thread may ask which adapters there are.
    """

    def __init__(
        self, loaded: LoadedModel | None, slots: int, *, native: bool, refused: str = ""
    ) -> None:
        """`slots` is the most adapters at a time; `refused` the reason why there can be none. Only
        then `loaded` may be None.
        """
        self.step = StepAdapters()
        self._loaded = loaded
        self._native = native
        self._refused = refused
        self._layers: list[Layer] = []
        self._sites: dict[str, Site] = {}
        self._updates: dict[str, Update] = {}
        self._undo: list[Callable[[], None]] = []
        self._slots: dict[str, int] = {}
        self._retired: set[str] = set()
        self._free = list(range(slots))
        self._num_slots = slots
        self._bytes: dict[str, int] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the adapters that new sequences may have."""
        # Copies: the thread that runs the steps may install or remove an adapter meanwhile.
        retired = frozenset(self._retired)
        return tuple(one for one in tuple(self._slots) if one not in retired)

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of all installed adapters."""
        return tuple(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the installed adapters' factors."""
        return sum(self._bytes.values())

    def serves(self, adapter_id: str) -> bool:
        """Whether new sequences may have the adapter."""
        # In this order, since `remove` in another thread changes the slots first.
        return adapter_id not in self._retired and adapter_id in self._slots

    def retire(self, adapter_id: str) -> None:
        """No new sequence may have the adapter; those that have it go on."""
        self._retired.add(adapter_id)

    def keep(self, adapter_id: str) -> None:
        """Takes `retire` back."""
        self._retired.discard(adapter_id)

    def slot(self, adapter_id: str) -> int | None:
        """The slot of an installed adapter; None if there is no such adapter."""
        return self._slots.get(adapter_id)

    def find_sites(self) -> None:
        """Finds the layers that adapters may change. Runs a step, so call it before others run."""
        if not self._sites and not self._refused:
            assert self._loaded is not None, "it is refused"
            self._layers = find_layers(self._loaded)
            self._sites = {layer.site.name: layer.site for layer in self._layers}

    def prepare(self, files: AdapterFiles, name: str) -> Adapter:
        """Checks the adapter against the model and makes its factors. Raises ModelRefused, whose
        message begins with `name`.
        """
        if self._refused:
            raise ModelRefused(f"adapter {name!r:.100}: {self._refused}")
        try:
            if missing := missing_modules(files, iter(self._sites)):
                raise ValueError(
                    f"it has no factors for {len(missing)} layers that target_modules names; the "
                    f"first is {missing[0]}"
                )
            factors = {module: self._factors(files, module) for module in sorted(files.factors)}
        except ValueError as error:
            raise ModelRefused(f"adapter {name!r:.100}: {error}") from None
        return Adapter(files.adapter_id, factors)

    def install(self, adapter: Adapter) -> None:
        """Makes an adapter available to the next step, after a trial step with it. Does nothing if
        it is installed.

        Raises ModelRefused if all slots are taken, and if the model with the adapter overflows.
        """
        if adapter.adapter_id in self._slots:
            return
        if not self._free:
            raise ModelRefused(
                f"{self._num_slots} adapters are loaded, as many as adapters.max_loaded allows; "
                "unload one first"
            )
        if not self._updates:
            self._updates, self._undo = attach(
                self._layers, self.step, self._num_slots, native=self._native
            )
        assert self._loaded is not None, "only then an adapter can be prepared"
        slot = self._free[0]
        for module, update in self._updates.items():
            update.set(slot, adapter.factors.get(module))
        if overflows(self._loaded, self._layers, self.step, slot):
            self._clear(slot)
            raise ModelRefused(
                "the base model's values overflow with the adapter; its factors are too large, or "
                "it is for another base model"
            )
        self._free.pop(0)
        self._slots[adapter.adapter_id] = slot
        self._bytes[adapter.adapter_id] = adapter.nbytes

    def remove(self, adapter_id: str) -> None:
        """Removes an adapter that no sequence uses. Does nothing if there is no such adapter."""
        slot = self._slots.pop(adapter_id, None)
        # Afterwards: as long as it has a slot, `serves` in another thread must find it retired.
        self._retired.discard(adapter_id)
        if slot is None:
            return
        self._clear(slot)
        del self._bytes[adapter_id]
        self._free.append(slot)

    def close(self) -> None:
        """Takes the updates off the model, which another runner may use. No step may be running."""
        for undo in self._undo:
            undo()
        self._undo = []
        for adapter_id in self.held:
            self.remove(adapter_id)
        self._updates = {}

    def _clear(self, slot: int) -> None:
        for update in self._updates.values():
            update.set(slot, None)

    def _factors(self, files: AdapterFiles, module: str) -> LowRank:
        """The factors of a module in the model's dtype. Raises ValueError."""
        site, stored = self._sites.get(module), files.factors[module]
        if site is None:
            near = difflib.get_close_matches(module, self._sites, n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"the base model has no linear layer {module!r:.120} that adapters may change; "
                "output heads, embeddings, experts and kv_b_proj of latent attention are not "
                f"supported{hint}"
            )
        if (stored.b.rows, stored.a.columns) != (site.outputs, site.inputs):
            raise ValueError(
                f"{module} has factors for a weight [{stored.b.rows}, {stored.a.columns}], and the "
                f"base model's is [{site.outputs}, {site.inputs}]; the adapter is for another model"
            )
        a, b = (self._matrix(files, one, module) for one in (stored.a, stored.b))
        return LowRank(a, panels_of(b) if self._native else b, files.config.scale_of(module))

    def _matrix(self, files: AdapterFiles, stored: StoredTensor, module: str) -> torch.Tensor:
        raw = bytearray(files.data[stored.start : stored.end])
        matrix = torch.frombuffer(raw, dtype=_DTYPES[stored.dtype])
        assert self._loaded is not None, "it is refused"
        model = self._loaded.model
        matrix = matrix.view(stored.rows, stored.columns).to(model.device, model.dtype)
        if not matrix.isfinite().all():
            raise ValueError(
                f"{module} has factors that are not finite in {str(model.dtype)[6:]}; the file is "
                "damaged, or the training has failed"
            )
        return matrix
