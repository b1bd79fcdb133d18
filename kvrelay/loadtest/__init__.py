"""The load harness: a planned load, sent open loop, and what it measured."""
