"""The names of the registry's keys in Redis."""

from __future__ import annotations

from typing import get_args

from kvrelay.config.redis_url import DEFAULT_NAMESPACE, MODEL_MARK
from kvrelay.types.workers import Role


class RegistryKeys:
    """The keys of one namespace, and the channel of its changes. Keys that end with a colon are
    prefixes of one key per worker, router, controller or pool.
    """

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        model = namespace.partition(MODEL_MARK)[2]
        # Begin of the workers' names in a cluster of several models, else empty.
        self.worker_prefix = f"{model}." if model else ""
        self.epoch = f"{namespace}:epoch"
        self.term = f"{namespace}:term"
        self.worker = f"{namespace}:worker:"
        self.router = f"{namespace}:router:"
        self.controller = f"{namespace}:controller:"
        self.pending = f"{namespace}:pending:"
        self.standby = f"{namespace}:standby:"
        self.ended = f"{namespace}:ended:"
        self.changes = f"{namespace}:changes"
        self.leader = f"{namespace}:leader"
        self.desired = f"{namespace}:desired"
        self.names = f"{namespace}:names"
        self.drains = f"{namespace}:drains"
        self.restarts = f"{namespace}:restarts"
        self.adapters = f"{namespace}:adapters"
        self.decisions = f"{namespace}:decisions"
        self.delayed = f"{namespace}:delayed:"

    def worker_name(self, stem: str, number: int) -> str:
        """Returns the name of a worker; `stem` is its role, with or without a tag. The name begins
        with the model's in a cluster of several models, so that no two workers of the cluster have
        the same name.
        """
        return f"{self.worker_prefix}{stem}-{number}"

    def role_and_number(self, worker_id: str) -> tuple[str, int]:
        """Returns what the name of a worker was made of. The role is empty for a name with a tag,
        and for other names.
        """
        stem, _, number = worker_id.removeprefix(self.worker_prefix).rpartition("-")
        # Redis counts whole numbers of 15 digits exactly.
        is_number = number.isascii() and number.isdecimal() and len(number) <= 15
        return (stem, int(number)) if stem in get_args(Role) and is_number else ("", 0)
