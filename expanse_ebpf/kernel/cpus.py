"""CPU lists as the kernel writes them: `0-3,8-11,64`."""

from __future__ import annotations

import os

ONLINE = "/sys/devices/system/cpu/online"
POSSIBLE = "/sys/devices/system/cpu/possible"
_HIGHEST = 65535  # far above any kernel's NR_CPUS; keeps a damaged list from filling memory


def parse_cpu_list(text: str) -> list[int]:
    """The ids in `text`, rising, each once; parts that are no CPU range are passed over."""
    cpus: set[int] = set()
    for part in text[:65536].split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            continue
        if len(first) > 5 or len(last) > 5 or int(last) > _HIGHEST:
            continue
        cpus.update(range(int(first), int(last) + 1))
    return sorted(cpus)


def online(path: str = ONLINE) -> list[int]:
    """The CPUs that are on now, rising; where the file is missing, 0 to the number of CPUs less one."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return parse_cpu_list(file.read(65536))
    except OSError:
        return list(range(os.cpu_count() or 1))


def count(path: str = POSSIBLE) -> int:
    """How many ids a table by CPU must have room for: the highest id that can ever come, plus 1."""
    return max(online(path), default=0) + 1
