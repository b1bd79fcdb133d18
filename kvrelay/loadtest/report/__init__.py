"""The results of a load test."""
