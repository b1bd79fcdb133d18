"""Attention over paged KV."""
