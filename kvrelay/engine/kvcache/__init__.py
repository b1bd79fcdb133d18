"""Which block holds which tokens. Does not import torch."""
