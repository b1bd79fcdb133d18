"""Clients' connections: accepting, reading and writing in turns."""
