"""Whose request is next: the fair queue, preemption, and paces."""
