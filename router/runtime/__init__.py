"""The event loop around the core: sessions with workers, streams to clients, and work in slices."""
