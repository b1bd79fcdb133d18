"""Texts and chat templates. The router uses these; neither torch nor transformers is imported."""
