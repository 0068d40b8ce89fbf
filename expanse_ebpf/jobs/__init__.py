"""From cgroup paths and processes to job identity."""
