"""The process of `kvrelay kv-store`: KV blocks in memory, for the workers of several hosts."""
