"""Pool sizes for a workload."""
