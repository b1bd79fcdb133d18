"""The measuring clients for gRPC and HTTP."""
