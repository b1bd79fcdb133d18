"""Drops tokens of a long sequence from its KV, and gives the memory back."""
