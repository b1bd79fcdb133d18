"""Worker state in the router: load, health, link health and model versions."""
