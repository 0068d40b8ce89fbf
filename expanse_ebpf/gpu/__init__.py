"""GPUs: what NVML says of them, in a process of its own, and which job holds which."""
