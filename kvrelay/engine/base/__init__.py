"""Types, devices and memory that several parts of the engine share."""
