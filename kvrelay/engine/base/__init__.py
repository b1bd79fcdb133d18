"""What all rooms of the engine share."""
