"""What NVML says of the GPUs: a worker process that asks it, and the agent's side of that."""
