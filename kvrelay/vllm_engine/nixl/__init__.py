"""vLLM's own transfer of KV by NIXL."""
