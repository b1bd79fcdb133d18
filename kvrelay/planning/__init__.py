"""Arithmetic of capacity: memory, step times, queueing, and the sizes of pools. Pure."""
