"""Generated from proto/kvrelay/v1 by scripts/generate_stubs.py. Never edited."""
