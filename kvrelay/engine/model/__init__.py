"""Loads a model and checks, before it serves, that the engine computes the same as transformers."""
