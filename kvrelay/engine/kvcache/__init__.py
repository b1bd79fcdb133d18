"""Which block holds which tokens. Without torch."""
