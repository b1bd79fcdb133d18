"""The cluster configuration, policies and tokens files."""
