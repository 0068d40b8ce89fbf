"""The columns of a stored sample, and where in a JobSample each comes from."""

from __future__ import annotations

from expanse_ebpf.wire.collector_pb2 import JobSample

MAX_INTEGER = 2**63 - 1  # SQLite's integers have a sign

_SAMPLE = (
    "processes",
    "cpu_ns",
    "cpu_user_ns",
    "cpu_system_ns",
    "memory_bytes",
    "memory_peak_bytes",
    "memory_limit_bytes",
    "memory_anon_bytes",
    "memory_file_bytes",
    "oom_kills",
    "io_read_bytes",
    "io_write_bytes",
    "io_read_ops",
    "io_write_ops",
    "cpu_limit_cores",
    "throttled_ns",
    "throttled_periods",
)
_HARDWARE = ("cycles", "instructions", "cache_references", "cache_misses", "branch_misses")
_SOFTWARE = (
    "page_faults",
    "context_switches",
    "migrations",
    "run_queue_wait_ns",
    "run_ns",
    "forks",
    "execs",
)
_PRESSURE = ("cpu", "memory", "io")
_NETWORK = (
    "received_bytes",
    "sent_bytes",
    "received_packets",
    "sent_packets",
    "dropped_packets",
    "error_packets",
)
_DELAYS = ("cpu_ns", "block_io_ns", "swap_in_ns", "memory_reclaim_ns")
_GPU = (
    "busy_ns",
    "measured_ns",
    "sm_active_ns",
    "profiled_ns",
    "energy_mj",
    "power_mw",
    "memory_bytes",
    "memory_total_bytes",
)
# Of a job's Python threads; shares in thousandths, since SQLite takes eight bytes for a fraction.
_PYTHON = ("python_loading_ns", "python_hottest_permille", "python_waiting_permille")

COLUMNS: tuple[str, ...] = (
    "state",
    *_SAMPLE,
    *(name for counter in _HARDWARE for name in (counter, f"{counter}_running_ratio")),
    *_SOFTWARE,
    *(f"{kind}_pressure_{part}_us" for kind in _PRESSURE for part in ("some", "full")),
    *(f"network_{field}" for field in _NETWORK),
    *(f"delay_{field}" for field in _DELAYS),
    "gpus",
    *(f"gpu_{field}" for field in _GPU),
    # What came later stands at the end, as in a file that was brought up to date.
    "gpu_throttled_ns",
    *_PYTHON,
)

Value = int | float | None


def values(sample: JobSample) -> list[Value]:
    """The sample's values in the order of COLUMNS; None where a figure is absent or past SQLite's range."""
    row: list[Value] = [sample.state]
    has = sample.HasField
    row += [getattr(sample, name) if has(name) else None for name in _SAMPLE]
    if has("counters"):
        counters = sample.counters
        has = counters.HasField
        for name in _HARDWARE:
            if has(name):
                counter = getattr(counters, name)
                row += (counter.value, counter.running_ratio)
            else:
                row += (None, None)
        row += [getattr(counters, name) if has(name) else None for name in _SOFTWARE]
    else:
        row += [None] * (2 * len(_HARDWARE) + len(_SOFTWARE))
    for kind in _PRESSURE:
        pressure = getattr(sample, f"{kind}_pressure")
        row += [getattr(pressure, f) if pressure.HasField(f) else None for f in ("some_us", "full_us")]
    if sample.HasField("network"):
        row += [getattr(sample.network, name) for name in _NETWORK]
    else:
        row += [None] * len(_NETWORK)
    if sample.HasField("delays"):
        delays = sample.delays
        row += [getattr(delays, name) if delays.HasField(name) else None for name in _DELAYS]
    else:
        row += [None] * len(_DELAYS)
    if sample.HasField("gpu"):
        gpu = sample.gpu
        row.append(len({hold.uuid for hold in gpu.holds}))
        row += [getattr(gpu, name) if gpu.HasField(name) else None for name in _GPU]
    else:
        row += [None] * (1 + len(_GPU))
    row.append(sample.gpu.throttled_ns if sample.gpu.HasField("throttled_ns") else None)
    if sample.HasField("python"):
        python = sample.python
        row.append(python.loading_ns if python.HasField("loading_ns") else None)
        row.append(_permille(python.hottest_share) if python.hottest_function else None)
        row.append(_permille(python.waiting_share) if python.waiting_function else None)
    else:
        row += [None] * len(_PYTHON)
    return [None if value is not None and value > MAX_INTEGER else value for value in row]


def _permille(share: float) -> int | None:
    return round(share * 1000) if 0 <= share <= 1 else None
