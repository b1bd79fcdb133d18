"""Observability of the router: metrics, traces, request log, dashboard and heartbeat."""
