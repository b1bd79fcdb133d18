"""What `kvrelay profile` prints."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from support import simulated

from kvrelay.cli.experiments.profile import profile_view


def test_step_times_have_units_and_no_exponents() -> None:
    found = simulated.profile()
    costs = replace(
        found.costs, prefill_base_s=0.0021, prefill_token_s=3.1e-5, prefill_token_context_s=4.2e-9
    )
    console = Console(width=120)
    residuals = {
        f"{step}_{kind}": 0.01
        for step in ("prefill", "decode", "handoff")
        for kind in ("rms", "most")
    }
    with console.capture() as capture:
        console.print(profile_view(replace(found, costs=costs, residuals=residuals)))
    shown = capture.get()
    assert "2.1 ms + 31 us x tokens + 0.0042 us x tokens x context" in shown
    assert "e-0" not in shown
