"""Fits the step costs of a worker on the machine at hand."""
