"""Commands that measure or simulate, without serving clients."""
