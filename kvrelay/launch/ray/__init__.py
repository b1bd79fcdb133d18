"""Ray: addresses, the local or joined cluster, and a worker that runs as an actor."""
