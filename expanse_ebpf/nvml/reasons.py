"""NVML's return codes as words for scripts and sentences for people."""

from __future__ import annotations

LOST, RESET_REQUIRED, UNKNOWN = 15, 16, 999
NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, TIMEOUT, NO_DATA = 3, 6, 7, 10, 21
INVALID_ARGUMENT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH = 2, 12, 13, 25

# Not NVML's.
ABSURD = -1  # the call went well, but the figure cannot be true
HUNG = -2
CRASHED = -3
NOT_LOADED = -4
TOO_MANY = -5

_OWN = {
    ABSURD: ("absurd", "NVML gives a figure that cannot be true"),
    HUNG: ("hung", "NVML did not answer when it was asked about this GPU, so it is asked rarely"),
    NOT_LOADED: ("library_not_loaded", "the library that was found cannot be loaded, or is not NVML"),
    TOO_MANY: ("too_many", "there are more than can be told"),
    CRASHED: ("worker_died", "NVML crashed when it was asked about this GPU, so it is asked rarely"),
}
# nvmlReturn_t of nvml.h: code to (word, sentence).
_CODES = {
    1: ("uninitialized", "NVML is not initialised"),
    2: ("invalid_argument", "NVML does not know this device any more"),
    3: ("not_supported", "this GPU or driver has it not"),
    4: ("no_permission", "the driver gives it to root alone"),
    6: ("not_found", "NVML finds nothing"),
    8: ("insufficient_power", "the GPU has no external power"),
    9: ("driver_not_loaded", "the NVIDIA driver is not loaded"),
    10: ("timeout", "the driver did not answer in time"),
    11: ("irq_issue", "the GPU's interrupts do not arrive"),
    12: ("library_not_found", "there is no libnvidia-ml.so.1"),
    13: ("function_not_found", "this driver's library has no such function"),
    14: ("corrupted_inforom", "the GPU's information memory is corrupt"),
    15: ("gpu_is_lost", "the GPU has fallen off the bus or is not accessible"),
    16: ("reset_required", "the GPU needs a reset"),
    17: ("operating_system", "the operating system or a device cgroup keeps NVML from the GPU"),
    18: ("driver_library_mismatch", "the loaded driver and libnvidia-ml.so.1 are of different versions"),
    19: ("in_use", "the GPU is in use"),
    20: ("memory", "NVML has no memory"),
    21: ("no_data", "NVML has no data yet"),
    23: ("insufficient_resources", "NVML lacks resources"),
    25: ("version_mismatch", "this driver's library wants another form of the question"),
    27: ("not_ready", "the driver is not ready yet"),
    999: ("unknown_error", "NVML gives an unknown error"),
}


def word(code: int) -> str:
    """A name that does not change, e.g. "driver_library_mismatch"."""
    known = _OWN.get(code) or _CODES.get(code)
    return known[0] if known else f"nvml_error_{code}"


def sentence(code: int) -> str:
    """What it means; with the number where it is NVML's."""
    if code in _OWN:
        return _OWN[code][1]
    return f"{_CODES[code][1] if code in _CODES else 'NVML gives an error'} (NVML error {code})"
