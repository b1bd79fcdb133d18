"""Tensor parallelism: processes of one node share a model's weights and KV heads and compute each
step together.
"""
