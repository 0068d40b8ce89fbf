"""From an arm to the settings of its agent."""

from __future__ import annotations

import json
from pathlib import Path

from expanse_ebpf import config
from expanse_ebpf.bench.plan import Arm, Plan

_TRACES = ("traces_idle", "traces_by_rule", "traces_on_request")
RULES = """\
- name: any_job
  about: Any job that runs.
  when: processes >= 1.0
  for: 0s
  cooldown: 60s
  window: {stacks: true}
"""


def of_arm(
    plan: Plan, arm: Arm, folder: Path, node: str, address: str, *, closely: bool, window_s: float = 0.0
) -> dict[str, dict[str, object]]:
    """The agent's settings by table and name; `arm.settings` has the last word."""
    tables: dict[str, dict[str, object]] = {
        "agent": {
            "interval_s": plan.interval_s,
            "socket": str(folder / "agent.sock"),
            "state_dir": str(folder / "state"),
            "node_name": node,
        },
        "controller": {"address": address},
        "cpu": {} if arm.cpu_counters else {"counters": []},
        "sources": {"python": arm.kind in ("python_stacks", "both"), "traces": arm.kind in _TRACES},
        "gpu": {"profiler": arm.kind in ("gpu_profiler", "both")},
        "tracing": {},
    }
    if window_s > config.TracingConfig().max_window_s:
        tables["tracing"]["max_window_s"] = window_s
    for table, content in arm.settings.items():
        tables.setdefault(table, {}).update(content)
    if closely:
        tables["cpu"]["bpf_stats"] = "always"
    return tables


def toml(tables: dict[str, dict[str, object]]) -> str:
    """Tables of strings, numbers, booleans and lists as a TOML document."""
    lines = []  # of these kinds JSON is TOML, but for DEL
    for table, content in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in content.items()]
    return "\n".join(lines).replace("\x7f", "\\u007f") + "\n"
