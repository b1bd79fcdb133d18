"""What decides, without I/O or a clock of its own: which worker runs a request, and what happens
when one fails.
"""
