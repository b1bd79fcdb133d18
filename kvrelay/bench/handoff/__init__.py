"""`kvrelay bench handoff`: the KV transfer rate between two workers, and the part of the transfer
that a request waits for.
"""
