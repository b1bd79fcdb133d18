"""The shared state of the components, in Redis."""
