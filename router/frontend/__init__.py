"""Preparation of requests: access, validation, tokenization and rate limits."""
