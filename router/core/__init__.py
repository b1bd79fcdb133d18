"""The scheduling decisions, without I/O or a clock: which worker runs a request, and what happens
when a worker fails.
"""
