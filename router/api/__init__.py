"""Client and operator APIs over gRPC and HTTP, with authentication, limits and errors."""
