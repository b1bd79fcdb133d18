"""The load test: plans a load, sends it in an open or a closed loop, and reports the
measurements.
"""
