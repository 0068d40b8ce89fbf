"""Low-overhead eBPF collector for GPU training clusters: the node agent and its command."""

__version__ = "0.1.0"
