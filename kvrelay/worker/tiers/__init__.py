"""KV blocks beyond the block pool: in host memory and in files on a local disk."""
