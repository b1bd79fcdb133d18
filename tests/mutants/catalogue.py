"""All safeguards that `make mutants` takes out, one after the other."""

from __future__ import annotations

from mutants import (
    of_adapters,
    of_eviction,
    of_gpus,
    of_inputs,
    of_models,
    of_planning,
    of_processes,
    of_router,
    of_scaling,
    of_security,
    of_simulation,
    of_speculation,
    of_standby,
    of_stores,
    of_tenants,
    of_tiers,
    of_transfer,
    of_windows,
    of_workers,
)

_MODULES = (
    of_transfer,
    of_router,
    of_workers,
    of_models,
    of_standby,
    of_scaling,
    of_security,
    of_gpus,
    of_inputs,
    of_tenants,
    of_tiers,
    of_stores,
    of_adapters,
    of_planning,
    of_simulation,
    of_speculation,
    of_processes,
    of_eviction,
    of_windows,
)
MUTANTS = tuple(one for module in _MODULES for one in module.MUTANTS)
