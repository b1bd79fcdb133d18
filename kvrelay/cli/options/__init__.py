"""Options that commands share, and their values."""
