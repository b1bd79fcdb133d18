"""What a load test says of its requests."""
