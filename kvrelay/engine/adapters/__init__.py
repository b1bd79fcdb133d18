"""LoRA adapters on a loaded model: their factors, and their updates of the rows of a step."""
