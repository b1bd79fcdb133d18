"""Experiments on the machine at hand that show what the two phases of inference cost."""
