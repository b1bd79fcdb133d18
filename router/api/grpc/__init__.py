"""The gRPC services of clients and operators."""
