"""The engine's steps: their loop, their watch and their measurement."""
