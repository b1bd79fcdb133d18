"""What both kinds of worker share: sequences, the step loop, sessions with routers, heartbeats."""
