"""The grammars of a model that cannot follow guidance."""

from __future__ import annotations

from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.errors import InvalidArgument


class NoGrammars:
    def warm_up(self) -> None:
        """Nothing: there is no vocabulary."""

    def open(self, *_: object) -> Matcher:
        raise InvalidArgument("this model cannot follow guidance", field="guidance")
