"""KV blocks in memory: their places, layouts, copies and digests."""
