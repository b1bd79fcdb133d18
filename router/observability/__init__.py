"""What a router shows: metrics, traces, the request log, the dashboard and its own heartbeat."""
