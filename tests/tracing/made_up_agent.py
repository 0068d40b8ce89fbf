"""A command of expanse-ebpf whose windows' processes do what a test tells them to: HOW COMMAND…

COMMAND is that of Python with `-m expanse_ebpf` and what follows.
"""

from __future__ import annotations

import sys

from expanse_ebpf.cli import main
from expanse_ebpf.tracing import process
from tests.tracing.made_up_window import command

if __name__ == "__main__":
    process.COMMAND = command(sys.argv[1])  # type: ignore[assignment]
    sys.argv[1:] = sys.argv[5:]
    main()
