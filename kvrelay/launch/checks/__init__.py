"""Checks before a cluster starts."""
