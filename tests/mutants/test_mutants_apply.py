"""Each safeguard that `make mutants` takes out is still where it was, and so are the tests that
miss it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from mutants.catalogue import MUTANTS
from mutants.mutant import ROOT, DoesNotApply, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_it_applies(mutant: Mutant) -> None:
    assert mutant.before != mutant.after
    mutant.check(ROOT)


def test_names_are_distinct() -> None:
    assert max(Counter(one.name for one in MUTANTS).values()) == 1


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        (Mutant("a", "kv_transfer/no_such_file.py", "x", "y", ()), "is gone"),
        (Mutant("b", "kv_transfer/lease.py", "no such text", "y", ()), "stands 0 times"),
        (Mutant("c", "kv_transfer/lease.py", "lease", "y", ()), "times in"),
        (
            Mutant("d", "kv_transfer/lease.py", "if epoch != self.epoch:", "if", ()),
            "would not be Python",
        ),
        (
            Mutant(
                "e",
                "kv_transfer/lease.py",
                "if epoch != self.epoch:",
                "if True:",
                ("unit/kv_transfer/test_lease.py::test_nothing",),
            ),
            "no test",
        ),
    ],
)
def test_what_has_moved_is_told(mutant: Mutant, says: str) -> None:
    with pytest.raises(DoesNotApply, match=says):
        mutant.check(ROOT)
