"""All safeguards that `make mutants` takes out, one after the other."""

from __future__ import annotations

from mutants import of_inputs, of_router, of_transfer, of_workers

MUTANTS = (*of_transfer.MUTANTS, *of_router.MUTANTS, *of_workers.MUTANTS, *of_inputs.MUTANTS)
