"""From a request to token ids that may run: access, validation, tokenization and rate limits."""
