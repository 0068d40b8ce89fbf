"""Loading and attaching BPF objects and reading their maps; the only place that talks to libbpf."""
