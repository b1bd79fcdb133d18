"""What the router knows of the prefix caches of workers."""
