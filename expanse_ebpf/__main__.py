"""`python -m expanse_ebpf`."""

from expanse_ebpf.cli import main

main()
