"""The models that a router serves, by the names that clients send."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Sequence

from kvrelay.errors import InvalidArgument, KvRelayError, NotFound
from kvrelay.tenants import Tenant
from kvrelay.types.workers import WorkerState
from router.served_model import LoadedModel, RouterContext, ServedModel

# Names that an error lists.
_SHOWN = 8
# Characters of a name that are compared.
_COMPARED = 128


class Catalogue:
    """The served models, at least one."""

    def __init__(self, context: RouterContext, loaded: Sequence[LoadedModel]) -> None:
        self._changed = asyncio.Event()
        self._models: tuple[ServedModel, ...] = tuple(
            ServedModel(one, context, self._changed, is_first=one is loaded[0]) for one in loaded
        )
        for model in self._models:
            model.view.models = self.names
            model.page.drivers = {one.name: one.driver for one in self._models}
            model.adapters.others = [one.adapters for one in self._models if one is not model]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the base models."""
        return tuple(one.name for one in self._models)

    def find(self, name: str) -> ServedModel:
        """Returns the model with this name, or with an adapter of this name. A router of a single
        model returns that one for every name; its frontend checks the name.

        Raises NotFound, and InvalidArgument for an empty name.
        """
        if len(self._models) == 1:
            return self._models[0]
        if not name:
            raise InvalidArgument(
                f"model is missing, and this cluster serves {self._listed()}; name one",
                field="model",
            )
        for one in self._models:
            if one.serves(name):
                return one
        near = difflib.get_close_matches(name[:_COMPARED], self.names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise NotFound(
            f"model {name[:100]!r} does not exist; this cluster serves {self._listed()}, see "
            f"/v1/models{hint}",
            field="model",
        )

    async def changed(self) -> None:
        """Waits until `state` may have changed since the last return of this method."""
        await self._changed.wait()
        self._changed.clear()

    def check_caller(self, tenant: Tenant) -> None:
        """Checks the tenant before the request's body is read. Raises the error with which each of
        the models would reject any request of the tenant now.
        """
        for place, one in enumerate(self._models, 1):
            try:
                one.frontend.check_caller(tenant)
            except KvRelayError:
                if place == len(self._models):
                    raise
            else:
                return

    @property
    def state(self) -> WorkerState:
        """`draining`; `ready` if a request for one of the models can be served and all were ready
        once; else `starting`.
        """
        if any(one.driver.draining for one in self._models):
            return "draining"
        if not all(one.driver.started for one in self._models):
            return "starting"
        return "ready" if any(one.driver.state == "ready" for one in self._models) else "starting"

    def _listed(self) -> str:
        shown = ", ".join(map(repr, self.names[:_SHOWN]))
        more = len(self._models) - _SHOWN
        return f"{shown} and {more} more" if more > 0 else shown
