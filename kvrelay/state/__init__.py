"""What the components know of each other, in Redis."""
