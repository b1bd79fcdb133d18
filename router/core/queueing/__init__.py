"""Order of waiting requests: the fair queue, preemption and pacing."""
