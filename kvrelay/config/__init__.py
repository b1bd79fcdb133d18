"""The cluster configuration, autoscaling policies and tokens files."""
