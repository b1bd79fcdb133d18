"""Shared parts of every process: logs, child processes, shutdown, and monitoring of the event
loop.
"""
