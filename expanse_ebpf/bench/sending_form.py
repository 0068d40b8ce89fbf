"""The list of all that may be sent of a bench's results, and how each value is cleaned for it.

Names that a person chose become kinds, models and versions are taken word by word from what is known to be
one, and figures are figures. What is cleaned once stays as it is when it is cleaned again.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable
from typing import Any, Final

from expanse_ebpf.bench.plan import ArmKind, WorkloadKind

FORM: Final = 1  # of the document; another number when what it holds changes
PROGRAMS = (
    "austin",
    "bpftrace",
    "memray",
    "nsys",
    "parca-agent",
    "perf",
    "py-spy",
    "pyinstrument",
    "scalene",
)
OTHER = "other"
WORKLOADS = (*typing.get_args(WorkloadKind), OTHER)
ARMS = (*typing.get_args(ArmKind), *PROGRAMS, OTHER)
_FAILURES = {
    "limit": re.compile("limit$|it took longer than"),
    "exit": re.compile("exit$|exit code"),
    "signal": re.compile("signal$|ended by"),
    "arm": re.compile(
        "arm$|the store gives|nothing was traced|probes were attached"
        "|.{1,256} (ended before the job|did not end within|failed: )"
    ),
}

# The words of processors' and GPUs' names. A host or a person is called otherwise, or is left out with the
# whole name, for without a maker it is no model.
_MAKERS = re.compile(
    "intel|amd|arm|neoverse|cortex|ampere|altra|graviton|apple|qemu|kunpeng|hygon|fujitsu|power|nvidia|tesla"
    "|geforce|quadro|instinct|radeon"
)
_WORDS = re.compile(
    "xeon|epyc|ryzen|threadripper|opteron|cores?|cpu|processor|platinum|gold|silver|bronze|max|ultra|gen"
    "|virtual|kvm|common|version|with|graphics|atom|celeron|pentium|pro|skylake|cascadelake|icelake|haswell"
    "|broadwell|sapphirerapids|ibrs|milan|rome|genoa|turin|naples|grace|rtx|gtx|titan|ada|generation|super|ti"
    "|laptop|gpu|device|hbm[23]e?|sxm[2-6]?|pcie|nvl|mig|hgx|oam|blackwell|server|workstation|edition|q|@"
)
_NUMBER = re.compile(
    r"\d{1,5}[A-Z]{0,3}|\d[A-Z]\d\d|[A-Z]{1,2}\d{1,4}[A-Z]{0,3}|[imw]\d|v\d|\d\d?th|\d\.\d\d?GHz|\d\.\d\+"
    r"|\d[gc]\.\d{1,3}gb"
)
# The first in a text, such as a program's own words; never as many numbers as an address has.
_VERSION = re.compile(r"(?<!\S)v?(\d{1,4}(?:\.\d{1,5}){1,2})(?!\.?\d)")

_Clean = Callable[[Any], Any]  # a value as it may be sent; None: not at all


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 2**63:
        return None
    return value if isinstance(value, int) else float(f"{value:.9g}")


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _one_of(*words: str) -> _Clean:
    return lambda value: None if not isinstance(value, str) else value if value in words else OTHER


def _label(kinds: Iterable[str]) -> _Clean:
    shape = re.compile(f"({'|'.join(map(re.escape, kinds))})(-[0-9]{{1,4}})?")
    return lambda value: value if isinstance(value, str) and shape.fullmatch(value) else None


def _version(value: Any) -> str | None:
    found = _VERSION.search(value[:1000]) if isinstance(value, str) else None
    return found[1] if found else None


def _failure(value: Any) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return next((name for name, words in _FAILURES.items() if words.match(value)), OTHER)


def _model(value: Any) -> str | None:
    """The words of a model's name that are known."""
    if not isinstance(value, str):
        return None
    kept: list[str] = []
    has_maker = False
    for word in value[:200].split():
        parts = re.sub(r"\((R|TM|r|tm)\)", "", word).strip("(),").split("-")
        if len(parts) > 4 or not all(map(_is_known, parts)):
            continue
        word = re.sub(r"[^A-Za-z0-9()@.+-]", "", word)
        if len(" ".join([*kept, word])) > 64:
            break
        kept.append(word)
        has_maker = has_maker or any(_MAKERS.fullmatch(part.lower()) for part in parts)
    return " ".join(kept) if has_maker else OTHER


def _is_known(part: str) -> bool:
    lower = part.lower()
    return any((_MAKERS.fullmatch(lower), _WORDS.fullmatch(lower), _NUMBER.fullmatch(part)))


_STATE = dict.fromkeys(
    ("load_1m", "frequency_mhz", "temperature_c", "gpu_temperature_c", "steal_share", "other_cores"), _number
)
_USAGE = dict.fromkeys(("cpu_s", "pss_peak_bytes", "disk_bytes", "sent_bytes"), _number)
_CELL = {"workload": _label(WORKLOADS), "arm": _label(ARMS)}
DOCUMENT: dict[str, Any] = {
    "form": lambda value: value if type(value) is int and value == FORM else None,
    "machine": {
        "kernel": _version,
        "architecture": _one_of("x86_64", "aarch64"),
        "cpu": _model,
        "cpus": _number,
        "memory_gib": _number,
        "virtualised": _one_of(
            *("", "kvm", "qemu", "vmware", "microsoft", "xen", "amazon", "google", "oracle", "apple"),
            *("docker", "podman", "lxc", "wsl", "bhyve", "parallels"),
        ),
        "pmu": _flag,
        "governor": _one_of("performance", "powersave", "schedutil", "ondemand", "conservative", "userspace"),
        "turbo": _flag,
        "smt": _flag,
        "gpus": [_model],
        "driver": _version,
        "python": _version,
        "expanse": _version,
        "tools": dict.fromkeys(PROGRAMS, _version),
    },
    "plan": {
        **dict.fromkeys(("interval_s", "settle_s"), _number),
        "controller_elsewhere": _flag,
        "stopping": dict.fromkeys(("min_pairs", "max_pairs", "centres", "within_points"), _number),
    },
    "workloads": [
        {
            "workload": _label(WORKLOADS),
            "device": _one_of("cpu", "cuda"),
            **dict.fromkeys(("cpus", "steps", "batch", "rate_hz"), _number),
            "own_images": _flag,
        }
    ],
    "arms": [{"arm": _label(ARMS), "cpu_counters": _flag, "other_settings": _flag}],
    "sessions": [{"begin_s": _number, "max_pairs": _number, "resumed": _flag}],
    "runs": [
        {
            **_CELL,
            "role": _one_of("off", "arm", "warm_up"),
            **dict.fromkeys(("pair", "attempt", "position", "begin_s", "seconds", "wall_s"), _number),
            "state": _STATE,
            **dict.fromkeys(("job_cpu_s", "job_memory_peak_bytes"), _number),
            "watched": _flag,
            "collector": _USAGE,
            "controller": _USAGE,
            "bpf_s_per_s": _number,
            "samples": dict.fromkeys(
                ("interval_s", "expected", "received", "longest_gap_s", "age_median_s", "looks"), _number
            ),
            "windows": dict.fromkeys(("opened", "traced_s", "probes_most"), _number),
            "failed": _failure,
        }
    ],
    "ends": [{**_CELL, "reason": _one_of("agreed", "max_pairs", "failed")}],
}
