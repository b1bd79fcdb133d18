"""A discrete-event simulation of a cluster: the production schedulers and policies in virtual
time.
"""
