"""The runtime around the core: worker sessions, client streams, and long work in slices."""
