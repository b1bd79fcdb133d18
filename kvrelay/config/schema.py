"""The schema of a cluster's configuration: one YAML file, frozen once loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from kvrelay.config.listen import ENDPOINTS, ListenConfig
from kvrelay.config.model_sections import ModelSections
from kvrelay.config.redis_url import DEFAULT_NAMESPACE, MODEL_MARK, Sentinels, without_password
from kvrelay.config.section import WITH_UNITS, BadValue, Section
from kvrelay.config.security import SecurityConfig
from kvrelay.config.tiers import TierConfig
from kvrelay.loopback import is_loopback
from kvrelay.types.workers import POOLS

_REDIS_URL = re.compile(r"^(embedded|rediss?(\+sentinel)?://.+|unix:///.+)$")
# Part of the names of Redis keys and of workers.
_SHORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# Models of one cluster.
MAX_MODELS = 32


def _short_name(text: str) -> str:
    if not _SHORT_NAME.fullmatch(text):
        raise ValueError(
            f"{text[:64]!r} is not a short name; allowed are 1 to 63 letters, digits and . _ -"
        )
    return text


def _namespace(text: str) -> str:
    cluster, _, model = text.partition(MODEL_MARK)
    _short_name(cluster)
    if model:
        # Of one model, as its workers get it.
        _short_name(model)
    return text


ShortName = Annotated[str, AfterValidator(_short_name)]


class RedisConfig(Section):
    """The Redis that holds the shared state of the cluster."""

    url: str = "embedded"
    # The begin of all keys, so that several clusters can share one Redis.
    namespace: Annotated[str, AfterValidator(_namespace)] = DEFAULT_NAMESPACE
    # Replicas that must acknowledge the controllers' lease before the lease is valid.
    confirm_replicas: Annotated[int, Field(ge=0, le=16)] = 0

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not _REDIS_URL.match(value):
            raise ValueError(
                "not the URL of a Redis; allowed are embedded, redis://HOST:PORT/DB, "
                "rediss://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE and "
                "unix:///PATH"
            )
        Sentinels.parse(value)
        return value


class ClusterConfig(ModelSections):
    """The whole configuration of a cluster."""

    # Several models, by name. The sections above are the defaults of each.
    models: dict[ShortName, ModelSections] = Field(default={}, max_length=MAX_MODELS)
    redis: RedisConfig = RedisConfig()
    listen: ListenConfig = ListenConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _models_differ(self) -> ClusterConfig:
        if self.models and MODEL_MARK in self.redis.namespace:
            raise BadValue(
                f"{self.redis.namespace!r} has {MODEL_MARK}, which comes before the name of a "
                "model; choose another",
                ("redis", "namespace"),
            )
        owners: dict[str, str] = {}
        for key, one in self.models.items():
            names = (key, one.model.name or key, *(each.name for each in one.adapters.serve))
            for name in dict.fromkeys(names):
                if name in owners:
                    raise BadValue(
                        f"{name!r} is also a name of {owners[name]}; give each model and each "
                        "adapter its own name",
                        ("models", key),
                    )
                owners[name] = key
            if one.router.processes != self.router.processes:
                raise BadValue(
                    f"{one.router.processes}, and the router has {self.router.processes} for all "
                    "models; set router.processes at the top of the file",
                    ("models", key, "router", "processes"),
                )
            if len(self.models) > 1 and any(one.pool_kv(pool).memory == "auto" for pool in POOLS):
                raise BadValue(
                    "auto is not supported with several models, which share the host; set a size, "
                    "such as 1GiB",
                    ("models", key, "kv", "memory"),
                )
        return self

    @model_validator(mode="after")
    def _others_are_kept_out(self) -> ClusterConfig:
        """Rejects an address that other machines can reach unless authentication and encryption are
        configured.
        """
        needs = {
            "security.tls": self.security.tls,
            "security.tokens_file": self.security.tokens_file,
        }
        for endpoint in ENDPOINTS:
            address: str = getattr(self.listen, endpoint)
            missing = [name for name, value in needs.items() if value is None]
            if missing and not is_loopback(address):
                raise BadValue(_exposed(address, missing), ("listen", endpoint))
        if self.security.tls is None and not self.listen.workers_on_loopback:
            raise BadValue(
                _exposed(self.listen.worker_host, ["security.tls"]), ("listen", "worker_host")
            )
        return self

    @model_validator(mode="after")
    def _stores_are_trusted(self) -> ClusterConfig:
        """Rejects a store on another host unless the connection to it is encrypted and the store
        shows a certificate.
        """
        if self.security.tls is not None:
            return self
        for where, tier in self._tiers():
            if far := [one for one in tier.addresses if not is_loopback(one)]:
                raise BadValue(
                    f"{far[0]} is not a loopback address and needs security.tls; set it, or name "
                    "stores on 127.0.0.1, localhost or [::1]",
                    (*where, "addresses"),
                )
        return self

    def _tiers(self) -> Iterator[tuple[tuple[str | int, ...], TierConfig]]:
        """All tiers of the configuration, each with the keys that lead to it."""
        named = ((("models", key), one) for key, one in self.models.items())
        sections: Iterable[tuple[tuple[str, ...], ModelSections]] = (((), self), *named)
        for at, one in sections:
            pools = (((pool, "kv"), one.pool(pool).kv.tiers or ()) for pool in POOLS)
            for where, tiers in ((("kv",), one.kv.tiers), *pools):
                for index, tier in enumerate(tiers):
                    yield (*at, *where, "tiers", index), tier

    @property
    def served(self) -> tuple[ClusterConfig, ...]:
        """The configuration of each served model, as if it were alone in the cluster."""
        if not self.models:
            return (self,)
        return tuple(self._of_model(key) for key in self.models)

    def only(self, key: str) -> ClusterConfig:
        """Returns the configuration of a cluster with one of the models."""
        return self._of_model(key).model_copy(update={"redis": self.redis})

    def with_paths(self, paths: Sequence[str]) -> dict[str, Any]:
        """Returns the fields that change when `paths` become those of the served models."""
        if not self.models:
            (path,) = paths
            return {"model": self.model.model_copy(update={"path": path})}
        return {
            "models": {
                key: one.model_copy(update={"model": one.model.model_copy(update={"path": path})})
                for path, (key, one) in zip(paths, self.models.items(), strict=True)
            }
        }

    def _of_model(self, key: str) -> ClusterConfig:
        sections = self.models[key]
        own = {name: getattr(sections, name) for name in ModelSections.model_fields}
        if sections.model.name is None:
            own["model"] = sections.model.model_copy(update={"name": key})
        namespace = f"{self.redis.namespace}{MODEL_MARK}{key}"
        redis = self.redis.model_copy(update={"namespace": namespace})
        return self.model_copy(update={**own, "models": {}, "redis": redis})

    def without_secrets(self, *, changed: bool = False, units: bool = False) -> dict[str, Any]:
        """Returns the effective values as plain data, with *** for the password of Redis. changed:
        only those that differ from the defaults. units: sizes have units, instead of bytes.
        """
        context = WITH_UNITS if units else None
        values = self.model_dump(mode="json", exclude_defaults=changed, context=context)
        if "url" in values.get("redis", {}):
            values["redis"]["url"] = without_password(self.redis.url)
        return values


def _exposed(address: str, missing: list[str]) -> str:
    return (
        f"{address} is not a loopback address and needs {' and '.join(missing)}; set "
        f"{'it' if len(missing) == 1 else 'both'}, or listen on 127.0.0.1, localhost or [::1]"
    )
