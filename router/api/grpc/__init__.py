"""The gRPC services for clients and operators."""
