"""What a router costs, with workers that answer at once."""
