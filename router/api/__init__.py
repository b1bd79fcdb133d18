"""What clients and operators reach: gRPC and HTTP, each with authentication, limits and errors."""
