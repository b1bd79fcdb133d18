"""`kvrelay loadtest`: its commands, their options, and what runs a test."""
