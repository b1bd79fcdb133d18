"""Code that prefill and decode workers share: sequences, the step loop, sessions with routers,
heartbeats.
"""
