"""The measured engines. Each engine runs in its own process and receives orders as lines of
JSON.
"""
