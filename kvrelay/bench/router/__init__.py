"""The cost of the router, measured with mock workers."""
