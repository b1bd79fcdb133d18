"""Clients that measure: gRPC and HTTP."""
