"""What every process needs: logs, child processes, an end, and a watch over its event loop."""
