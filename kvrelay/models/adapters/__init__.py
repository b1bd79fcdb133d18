"""LoRA adapters in PEFT's format: what their folders hold, checked without torch."""
