"""Micro-benchmarks that compare kvrelay with the measured limits of this machine."""
