"""The process of a worker: its settings, model, listener and registration."""
