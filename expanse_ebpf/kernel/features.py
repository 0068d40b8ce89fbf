"""What this node can do for the collector: the decisions, apart from the reading (see probe.py).

Each function turns what was read into one `Finding`. "missing" means that the collector cannot run
without it, "warning" that a part is off or that something deserves a look.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

OLDEST_KERNEL = (5, 10)
MEMCG_KERNEL = (5, 11)  # from here on BPF memory counts towards the memory cgroup, not RLIMIT_MEMLOCK
MACHINES = ("x86_64", "aarch64")
PERMISSION = (errno.EPERM, errno.EACCES)
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, the same on every kernel
INITIAL_USER_NAMESPACE = 0xEFFFFFFD

# Capability to (bit, what the collector needs it for).
CAPABILITIES = {
    "CAP_BPF": (39, "load BPF programs"),
    "CAP_PERFMON": (38, "trace the scheduler and open perf events"),
    "CAP_SYS_PTRACE": (19, "read other users' processes in /proc"),
    "CAP_DAC_OVERRIDE": (1, "read other users' environments, remove the cgroups of killed runs"),
    "CAP_CHOWN": (0, "give users the cgroups of their runs"),
    "CAP_SYS_ADMIN": (21, "time its own programs, look into jobs' networks and device cgroups"),
    "CAP_NET_ADMIN": (12, "ask for task delays, look into device cgroups"),
}
REQUIRED = ("CAP_BPF", "CAP_PERFMON")
_CAP_SYS_ADMIN = 21  # stands for CAP_BPF and CAP_PERFMON
_CAP_SYS_RESOURCE = 24

# What some kernels can and others cannot, to (the first that can, how it is without).
ABILITIES = {
    "bpf_loop": ((5, 17), "Python threads are seen while they run, not while they wait"),
    "uprobe_multi links": ((6, 6), "a uprobe takes a perf event for each symbol"),
    "sleepable task iterator": ((5, 18), "Python threads are seen while they run, not while they wait"),
    "attach cookies": ((5, 15), "probes cannot be told apart: no deep traces"),
}

# What can be sampled, as expanse_ebpf/python_stacks/layouts.py has it.
PYTHONS = "CPython 3.8 to 3.15"

Status = Literal["ok", "warning", "missing"]


class Finding(NamedTuple):
    """One line of `check`."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def parse_release(release: str) -> tuple[int, int]:
    """Major and minor number of a kernel release such as "6.1.0-18-amd64"; (0, 0) when it has none."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})", release, re.ASCII)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_lockdown(text: str | None) -> str:
    """The mode in brackets of /sys/kernel/security/lockdown; "none" when there is no such file."""
    match = re.search(r"\[(\w+)\]", text or "", re.ASCII)
    return match[1] if match else "none"


def parse_capabilities(status: str) -> int:
    """The effective set in a /proc/PID/status; 0 when it is not there."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]{1,16})$", status, re.MULTILINE)
    return int(match[1], 16) if match else 0


def absent_capabilities(effective: int) -> list[str]:
    """Names of the capabilities that the collector uses and has not got."""
    admin = effective >> _CAP_SYS_ADMIN & 1
    return [
        name
        for name, (bit, _) in CAPABILITIES.items()
        if not (effective >> bit & 1 or (admin and name in REQUIRED))
    ]


def may_raise_limits(effective: int) -> bool:
    """Whether limits on locked memory and open files can be raised above the hard ones."""
    return bool(effective >> _CAP_SYS_RESOURCE & 1)


# ---- the BPF side


def explain_load_error(
    code: int,
    release: str,
    effective: int,
    lockdown: str | None = None,
    memlock: int | None = None,
    seccomp: bool = False,
) -> str:
    """Cause and remedy, in one line, of an error from loading BPF programs or making BPF maps.

    `lockdown` is the text of the kernel's file, `memlock` the soft limit in bytes, -1 for none.
    """
    name = errno.errorcode.get(code, str(code))
    absent = [cap for cap in absent_capabilities(effective) if cap in REQUIRED]
    if code in PERMISSION:
        if absent:
            return f"{' and '.join(absent)} missing ({name}); run as root, or grant {' and '.join(absent)}"
        if parse_lockdown(lockdown) == "confidentiality":
            return (
                f"kernel lockdown is in confidentiality mode ({name}); boot with lockdown=integrity or none"
            )
        if parse_release(release) < MEMCG_KERNEL and memlock != -1:
            size = "the limit" if memlock is None else f"{memlock >> 10} KiB"
            return f"the locked-memory limit (memlock, {size}) is too low ({name}); set LimitMEMLOCK=infinity"
        if seccomp:
            return (
                f"a seccomp filter forbids bpf(2) ({name}); run the container with a profile that allows it"
            )
        return f"the kernel's verifier or a security module refuses it ({name}); see the kernel log"
    if code == errno.ENOMEM:
        return "not enough memory for the maps (ENOMEM); raise the memory limit of the agent's cgroup"
    if code in (errno.E2BIG, errno.ENOSPC):
        return f"the program is too large for this kernel's verifier ({name}); a newer kernel takes it"
    if code == errno.ENOSYS:
        return "the kernel has no bpf(2) (ENOSYS); boot one with CONFIG_BPF_SYSCALL=y"
    if code in (errno.EINVAL, errno.ESRCH, errno.ENOENT):
        return (
            f"the kernel lacks something that the program uses ({name}); one from 5.10 on, with BTF, has it"
        )
    return f"{os.strerror(code)} ({name}); see the kernel log"


def kernel(release: str, machine: str) -> Finding:
    """Whether the programs exist for this kernel and machine."""
    detail = f"{release} on {machine}"
    if machine not in MACHINES:
        return Finding("kernel", "missing", detail, f"use a machine with {' or '.join(MACHINES)}")
    if parse_release(release) < OLDEST_KERNEL:
        return Finding("kernel", "missing", detail, "boot Linux 5.10 or newer")
    return Finding("kernel", "ok", detail)


def btf(present: bool) -> Finding:
    """The kernel's description of its types, without which CO-RE cannot place a field."""
    if present:
        return Finding("btf", "ok", "/sys/kernel/btf/vmlinux")
    return Finding(
        "btf", "missing", "no /sys/kernel/btf/vmlinux", "boot a kernel with CONFIG_DEBUG_INFO_BTF=y"
    )


def libbpf(version: str | None) -> Finding:
    """The library that loads the programs; None: not installed."""
    if version is None:
        return Finding("libbpf", "missing", "no libbpf.so.1", "install it (Debian: apt-get install libbpf1)")
    return Finding("libbpf", "ok", f"version {version}")


def objects(found: Iterable[str], wanted: Iterable[str]) -> Finding:
    """The compiled programs for this machine, by file name."""
    absent = sorted(set(wanted) - set(found))
    if absent:
        return Finding(
            "bpf objects", "missing", f"no {', '.join(absent)}", "install the wheel, or run bpf/build_hook.py"
        )
    return Finding("bpf objects", "ok", ", ".join(sorted(wanted)))


def bpf_part(name: str, code: int, explanation: str) -> Finding:
    """A part of BPF that was tried for real: the error's number, 0 when it worked, and its explanation."""
    if not code:
        return Finding(name, "ok", "works (tried)")
    if code in PERMISSION and "CAP_" in explanation:  # has a line of its own
        return Finding(name, "missing", f"{os.strerror(code)} ({errno.errorcode[code]}), see capabilities")
    cause, _, remedy = explanation.partition("; ")
    return Finding(name, "missing", cause, remedy)


def ability(name: str, code: int, release: str) -> Finding:
    """One of ABILITIES that was tried: the error's number, 0 when it worked. None of them is required."""
    if not code:
        return Finding(name, "ok", "works (tried)")
    (major, minor), without = ABILITIES[name]
    reason = errno.errorcode.get(code, str(code))
    if parse_release(release) < (major, minor):
        return Finding(
            name, "warning", f"not in this kernel (tried: {reason}), Linux {major}.{minor} has it; {without}"
        )
    return Finding(name, "warning", f"refused (tried: {reason}); {without}")


def python_stacks(enabled: bool, why_not: str, waiting: int, release: str) -> Finding:
    """Sampling of Python stacks, as it was tried.

    `why_not`: why running threads cannot be sampled, with the remedy after "; ", empty when they can.
    `waiting`: the error's number of loading what reads waiting ones. None of it is required.
    """
    name = "python stacks"
    if not enabled:
        return Finding(name, "ok", "switched off (sources.python)")
    if why_not:
        cause, _, remedy = why_not.partition("; ")
        return Finding(name, "warning", f"Python stacks are not sampled: {cause}", remedy)
    if not waiting:
        return Finding(name, "ok", f"on CPUs and waiting, {PYTHONS} (tried)")
    (major, minor), _ = ABILITIES["sleepable task iterator"]
    old = parse_release(release) < (major, minor)
    why = f"needs Linux {major}.{minor}" if old else f"refused ({errno.errorcode.get(waiting, waiting)})"
    return Finding(name, "warning", f"on CPUs, {PYTHONS} (tried); waiting threads are not seen: {why}")


def deep_traces(enabled: bool, why_not: str, method: str) -> Finding:
    """Windows in which every call of CUDA functions is seen, as they were tried.

    `why_not`: why there can be none, with the remedy after "; ", empty when there can. `method`: how
    functions are probed, see kernel/uprobes.py. None of it is required.
    """
    name = "deep traces"
    if not enabled:
        return Finding(name, "ok", "switched off (sources.traces)")
    if why_not:
        cause, _, remedy = why_not.partition("; ")
        return Finding(name, "warning", f"calls of CUDA functions cannot be traced: {cause}", remedy)
    how = "uprobe_multi links" if method == "uprobe_multi" else "a perf event for each function"
    return Finding(name, "ok", f"calls of CUDA functions are probed by {how} (tried)")


def kernel_names(bcc: bool) -> Finding:
    """Whether BCC's library is there, which deep traces ask for the names of GPU kernels."""
    if bcc:
        return Finding("names of GPU kernels", "ok", "looked up by BCC, in deep traces")
    return Finding(
        "names of GPU kernels",
        "warning",
        "no libbcc.so.0 (BCC): deep traces show most GPU kernels without their names",
        "install it (Debian: apt-get install python3-bpfcc)",
    )


# ---- counters


def pmu(tested: Mapping[str, str]) -> Finding:
    """The hardware counters, by the result of the self-test: name to reason, "" when it is believed."""
    good = [name for name, why in tested.items() if not why]
    bad = {name: why for name, why in tested.items() if why}
    if not tested:
        return Finding("pmu", "ok", "no hardware counter is switched on (cpu.counters)")
    if not bad:
        return Finding("pmu", "ok", f"{', '.join(good)} count and pass the self-test")
    reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in _by_reason(bad).items())
    if good:
        return Finding("pmu", "warning", f"{', '.join(good)} pass the self-test, {reasons}")
    if all(why.startswith("unsupported") for why in bad.values()):
        why = next(iter(bad.values()))
        return Finding(
            "pmu",
            "warning",
            f"this machine has no PMU, {why}: hardware counters are unavailable, the rest works",
            "on a virtual machine ask for a virtual PMU",
        )
    return Finding("pmu", "warning", f"hardware counters are unavailable: {reasons}")


def _by_reason(bad: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, why in bad.items():
        reasons.setdefault(why, []).append(name)
    return reasons


def perf_paranoid(value: int | None, effective: int) -> Finding:
    """kernel.perf_event_paranoid, which binds only those without CAP_PERFMON."""
    if value is None:
        return Finding("perf events", "warning", "the kernel has none", "boot one with CONFIG_PERF_EVENTS=y")
    detail = f"kernel.perf_event_paranoid={value}"
    if "CAP_PERFMON" not in absent_capabilities(effective):
        return Finding("perf events", "ok", f"{detail}, does not bind CAP_PERFMON")
    if value <= 0:
        return Finding("perf events", "ok", detail)
    return Finding(
        "perf events", "warning", f"{detail} and no CAP_PERFMON", "grant CAP_PERFMON or run as root"
    )


def descriptors(soft: int, hard: int, cpus: int, events: int, may_raise: bool) -> Finding:
    """RLIMIT_NOFILE against one descriptor per CPU and event; -1 is no limit."""
    needed = cpus * events + 256  # and some for maps, programs, sockets and cgroup files
    limit = "unlimited" if -1 in (soft, hard) else str(hard)
    detail = f"{needed} needed for {cpus} CPUs and {events} counters, limit {limit}"
    if -1 in (soft, hard) or hard >= needed or may_raise:
        return Finding("open files", "ok", detail)
    return Finding("open files", "warning", detail, f"set LimitNOFILE={needed} or more")


# ---- rights


def capabilities(effective: int) -> Finding:
    """What the effective capabilities allow; root in the initial namespace has them all."""
    absent = absent_capabilities(effective)
    if not absent:
        return Finding("capabilities", "ok", "all that are used are there")
    required = [name for name in absent if name in REQUIRED]
    uses = "; ".join(f"{name} to {CAPABILITIES[name][1]}" for name in absent)
    return Finding(
        "capabilities",
        "missing" if required else "warning",
        f"missing {uses}",
        f"run as root, or grant {' and '.join(required)}" if required else f"grant {' and '.join(absent)}",
    )


def lockdown(text: str | None) -> Finding:
    """Kernel lockdown, from the text of its file; None when there is none."""
    mode = parse_lockdown(text)
    if mode == "confidentiality":
        return Finding(
            "lockdown",
            "warning",
            "confidentiality: no BPF program may read kernel or user memory, so no stacks (reason=lockdown); "
            "cgroup files and NVML go on",
            "boot with lockdown=integrity or none",
        )
    return Finding("lockdown", "ok", mode)


def memlock(release: str, soft: int, hard: int, may_raise: bool) -> Finding:
    """RLIMIT_MEMLOCK in bytes, -1 for none; it binds BPF maps only before Linux 5.11."""
    limit = "unlimited" if soft == -1 else f"{soft >> 10} KiB"
    if parse_release(release) >= MEMCG_KERNEL:
        return Finding("memlock", "ok", f"{limit}, does not bind BPF on this kernel")
    if soft == -1 or hard == -1 or may_raise:
        return Finding("memlock", "ok", f"{limit}, can be raised")
    return Finding("memlock", "warning", f"{limit} may be too low for BPF maps", "set LimitMEMLOCK=infinity")


def unprivileged_bpf(value: int | None) -> Finding:
    """kernel.unprivileged_bpf_disabled: of interest for the node's safety, not needed."""
    if value == 0:
        return Finding(
            "unprivileged bpf",
            "warning",
            "every user may load BPF programs; the collector does not need that",
            "sysctl kernel.unprivileged_bpf_disabled=2",
        )
    return Finding("unprivileged bpf", "ok", "off" if value else "not in this kernel")


def seccomp(filtered: bool) -> Finding:
    """Whether a filter stands between the collector and the kernel."""
    if filtered:
        return Finding("seccomp", "warning", "a filter is on; it may forbid bpf(2) and perf_event_open(2)")
    return Finding("seccomp", "ok", "no filter")


# ---- where it runs


def pid_namespace(inode: int | None, levels: int) -> Finding:
    """The pid namespace: the inode of /proc/self/ns/pid, and how many numbers NSpid lists."""
    if inode == INITIAL_PID_NAMESPACE and levels <= 1:
        return Finding("pid namespace", "ok", "the node's own (level 0)")
    if inode is None:
        return Finding("pid namespace", "warning", "/proc/self/ns/pid cannot be read", "mount /proc")
    return Finding(
        "pid namespace",
        "warning",
        "nested (nested_pid_ns): pids that the kernel side sees are not those in /proc here; jobs are told "
        "apart by cgroup, processes by their pid cannot be shown",
        "run the agent in the node's pid namespace (hostPID: true, docker --pid=host)",
    )


def user_namespace(inode: int | None) -> Finding:
    """The user namespace: capabilities in a nested one do not reach BPF or perf events."""
    if inode == INITIAL_USER_NAMESPACE:
        return Finding("user namespace", "ok", "the node's own")
    return Finding(
        "user namespace",
        "warning",
        "nested: its root has no capability over the node",
        "run the agent outside of a user namespace (no rootless container)",
    )


def cgroups(mode: str | None, names: Iterable[str], why: str = "") -> Finding:
    """How cgroups are mounted; `mode` None: not at all, or unreadable."""
    if mode is None:
        cause, _, remedy = why.partition("; ")
        return Finding(
            "cgroups", "missing", cause or "not mounted", remedy or "mount -t cgroup2 none /sys/fs/cgroup"
        )
    return Finding("cgroups", "ok", f"{mode}: {', '.join(names)}")


def filesystems() -> Finding:
    """Said because other tools need them."""
    return Finding("tracefs, bpffs", "ok", "not needed")


def headers(present: bool, btf_present: bool) -> Finding:
    """Kernel headers: only a kernel without BTF needs them."""
    if present:
        return Finding("kernel headers", "ok", "installed")
    if btf_present:
        return Finding("kernel headers", "ok", "not installed, not needed with BTF")
    return Finding(
        "kernel headers", "warning", "not installed", "install linux-headers for the running kernel"
    )


def delay_accounting(value: int | None, wanted: bool) -> Finding:
    """kernel.task_delayacct, for the source `delays`; None: not in this kernel."""
    if value:
        return Finding("delay accounting", "ok", "kernel.task_delayacct=1")
    if not wanted:
        return Finding("delay accounting", "ok", "off, and the source `delays` is switched off")
    if value is None:
        return Finding(
            "delay accounting",
            "warning",
            "no kernel.task_delayacct",
            "boot Linux 5.14 or newer with CONFIG_TASK_DELAY_ACCT=y",
        )
    return Finding("delay accounting", "warning", "kernel.task_delayacct=0", "sysctl kernel.task_delayacct=1")


def controller(address: str, why: str) -> Finding:
    """Whether the controller can be reached; `address` empty: none is configured."""
    if not address:
        return Finding("controller", "ok", "none configured (controller.address): nothing is sent")
    if why:
        return Finding(
            "controller",
            "warning",
            f"{address} cannot be reached: {why}; reports wait in memory",
            "start `expanse-controller serve` there, or correct controller.address",
        )
    return Finding("controller", "ok", f"{address} answers")


def agent(path: str, state: Literal["running", "absent", "stale", "denied"]) -> Finding:
    """Whether an agent answers on the node's socket already."""
    if state == "running":
        return Finding("agent", "ok", f"one runs already, on {path}")
    if state == "denied":
        return Finding(
            "agent", "warning", f"{path} may not be opened", "ask for access to it, or become root"
        )
    words = "none runs" if state == "absent" else "none runs; one was killed and left its socket"
    return Finding("agent", "ok", f"{words} ({path})")
