"""What the router knows of each worker: load, health, and which ones to avoid."""
