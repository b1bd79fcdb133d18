"""Engines under measurement, each in a process of its own that is told what to do in lines of
JSON.
"""
