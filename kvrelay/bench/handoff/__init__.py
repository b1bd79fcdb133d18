"""`kvrelay bench handoff`: how fast KV travels between two workers, and how much of that a request
waits for.
"""
