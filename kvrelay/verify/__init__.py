"""Verifies that every path through a cluster gives the same tokens."""
