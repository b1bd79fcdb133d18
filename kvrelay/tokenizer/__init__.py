"""Tokenizers and chat templates for the router. This package imports neither torch nor
transformers.
"""
