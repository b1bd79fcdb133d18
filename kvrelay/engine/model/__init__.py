"""Loads a model and checks, before it serves, that the engine computes what transformers
computes.
"""
