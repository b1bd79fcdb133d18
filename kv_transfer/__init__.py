"""Moves KV blocks from a prefill worker's arena to a decode worker's, under a lease."""
