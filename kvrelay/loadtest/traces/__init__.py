"""Request traces, and their replay."""
