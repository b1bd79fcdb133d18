"""Micro-benchmarks against this machine's own measured limits."""
