"""What commands read from and write to a terminal."""
