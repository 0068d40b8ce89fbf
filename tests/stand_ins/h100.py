"""Attributes of GPUs, as README.md names them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In the place of a value: NVML gives this error code for it."""

    code: int

    def __str__(self) -> str:
        return f"error {self.code}"


Value = str | int | float | Fault
H100: dict[str, Value] = {
    "name": "NVIDIA H100 80GB HBM3",
    "persistence": 1,
    "mig_mode": 0,
    "pci_device_id": 0x233010DE,
    "pci_subsystem_id": 0x16C110DE,
    "utilization": 0,
    "memory_utilization": 0,
    "memory_total": 85_520_809_984,
    "memory_reserved": 620_756_992,
    "memory_used": 0,
    "power_mw": 70_000,
    "power_average_mw": 70_000,
    "power_limit_mw": 700_000,
    "energy_mj": 1_000_000_000,
    "temperature_c": 30,
    "memory_temperature_c": 40,
    "clock_graphics": 345,
    "clock_sm": 345,
    "clock_memory": 2619,
    "clock_video": 765,
    "clock_max_graphics": 1980,
    "clock_max_sm": 1980,
    "clock_max_memory": 2619,
    "clock_max_video": 1545,
    "throttle_reasons": 1,
    "pcie_generation": 5,
    "pcie_width": 16,
    "pcie_replays": 0,
    "pcie_tx_kbps": 0,
    "pcie_rx_kbps": 0,
    "pcie_tx_bytes": 0,
    "pcie_rx_bytes": 0,
    "nvlinks": 18,
    "nvlink_tx_kib": 0,
    "nvlink_rx_kib": 0,
    "nvlink_raw_tx_kib": 0,
    "nvlink_raw_rx_kib": 0,
    "ecc_mode": 1,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "ecc_corrected_lifetime": 0,
    "ecc_uncorrected_lifetime": 0,
    "remapped_corrected": 0,
    "remapped_uncorrected": 0,
    "remapping_pending": 0,
    "remapping_failed": 0,
    "violation_power": 0,
    "violation_thermal": 0,
    "violation_sync_boost": 0,
    "violation_board_limit": 0,
    "violation_low_utilization": 0,
    "violation_reliability": 0,
    "violation_app_clocks": 0,
    "violation_base_clocks": 0,
    "event_types": 0x19F,
    "gpm_supported": 1,
    "samples.utilization": "",
    "samples.memory_utilization": "",
    "process_samples": "",
}
INSTANCE: dict[str, Value] = {
    "memory_total": 10_468_982_784,
    "memory_reserved": 0,
    "memory_used": 0,
    "memory_mib": 9984,
    "multiprocessors": 16,
    "gpu_slices": 1,
    "compute_slices": 1,
    "compute_instance": 0,
}

# Names of instances by how many slices they have.
PROFILES = {1: "1g.10gb", 2: "2g.20gb", 3: "3g.40gb", 4: "4g.40gb", 7: "7g.80gb"}

# Changes to an H100 that trains.
WORKING: dict[str, Value] = {
    "utilization": 87,
    "memory_utilization": 60,
    "memory_used": 64 << 30,
    "power_mw": 610_000,
    "power_average_mw": 605_000,
    "temperature_c": 66,
    "memory_temperature_c": 78,
    "clock_sm": 1755,
    "clock_graphics": 1755,
    "throttle_reasons": 0,
    "nvlink_tx_kib_rate": 9_000_000,
    "nvlink_rx_kib_rate": 9_000_000,
    "pcie_tx_bytes_rate": 900_000_000,
    "pcie_rx_bytes_rate": 1_200_000_000,
    "pcie_tx_kbps": 900_000,
    "pcie_rx_kbps": 1_200_000,
}

# What GPM says of it, by the ids of nvmlGpmMetricId_t: percent, and MiB/s of PCIe and NVLink.
WORKING_GPM: dict[int, Value] = {
    1: 95.0,  # graphics
    2: 88.5,  # SM
    3: 41.0,  # warps
    4: 12.0,  # integer
    5: 52.0,  # tensor
    10: 63.0,  # DRAM
    11: 0.0,  # FP64
    12: 9.0,  # FP32
    13: 4.5,  # FP16
    20: 850.0,
    21: 1200.0,
    60: 9000.0,
    61: 9000.0,
}
