"""Reading and trying what this node can do; the decisions are in features.py."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from expanse_ebpf import config as configuration
from expanse_ebpf.config import Config, SourcesConfig
from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.jobs import hierarchies
from expanse_ebpf.kernel import cpus, features, gpu_probe, libbpf, perf, trials
from expanse_ebpf.kernel.features import Finding

if TYPE_CHECKING:
    from expanse_ebpf.kernel.uprobes import Probes

BTF = "/sys/kernel/btf/vmlinux"
OBJECTS = ("cpu_accounting", "task_lifecycle", "python_stacks", "python_waits", "gpu_calls")
BCC = "libbcc.so.0"  # as in tracing/symbols.py, which this package may not import
CONNECT_S = 2.0


def read(path: str) -> str | None:
    """The first bytes of a file as text; None when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return None


def _number(path: str) -> int | None:
    try:
        return int(read(path) or "")
    except ValueError:
        return None


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None


def load_objects() -> tuple[int, str]:
    """Load and attach the collector's own programs for a moment: (error's number, what failed)."""
    from expanse_ebpf.kernel.accounting import Accounting
    from expanse_ebpf.kernel.lifecycle import Lifecycle

    try:
        lifecycle = Lifecycle("unified", 0, lambda event: None)
        try:
            accounting = Accounting(lifecycle)
            try:
                accounting.attach()
            finally:
                accounting.close()
        finally:
            lifecycle.close()
    except libbpf.BpfError as error:
        return error.errno, str(error)
    except UnavailableError as error:
        return errno.ENOENT, str(error)
    return 0, ""


def load_python_stacks() -> tuple[str, int]:
    """Sample Python stacks for a moment: (why running threads cannot be, error's number of waiting ones)."""
    from expanse_ebpf.kernel.python_stacks import PythonStacks

    try:
        stacks = PythonStacks(lambda record: None, 49)
    except libbpf.BpfError as error:
        return f"{error}: {explain(error.errno)}", 0
    except UnavailableError as error:
        return str(error), 0
    try:
        stacks.load_waits()
    except libbpf.BpfError as error:
        return "", error.errno
    finally:
        stacks.close()
    return "", 0


def load_gpu_calls() -> tuple[str, str]:
    """Probe a function that nobody calls for a moment: (why that cannot be, how it was done)."""
    from expanse_ebpf.kernel.gpu_calls import GpuCalls, supported
    from expanse_ebpf.kernel.lifecycle import Configuration
    from expanse_ebpf.kernel.python_stacks import PythonStacks

    if supported():
        return supported(), ""
    try:
        stacks = PythonStacks(lambda record: None, 0)
        try:
            calls = GpuCalls(lambda record: None, stacks, Configuration(0, 0, 0, cpus.count()))
            try:
                refused = _probe_file_in_memory(calls.calls, calls.add_calibration())
            finally:
                calls.close()
        finally:
            stacks.close()
    except libbpf.BpfError as error:
        return f"{error}: {explain(error.errno)}", ""
    except (UnavailableError, OSError) as error:
        return str(error), ""
    return f"a probe in a file is refused: {refused}; see the kernel log" if refused else "", calls.method


def _probe_file_in_memory(probes: Probes, cookie: int) -> str:
    """Why the kernel takes no probe in a file that nobody runs; empty when it does."""
    file = os.memfd_create("expanse-trial")
    try:
        os.write(file, bytes([0x90]) * resource.getpagesize())
        refused = probes.attach(f"/proc/self/fd/{file}", [(0, cookie)])
    finally:
        os.close(file)
    return "".join(refused.values())


def has_bcc() -> bool:
    """Whether BCC's library can be loaded; its initialisers run in this process."""
    try:
        ctypes.CDLL(BCC)
    except OSError:
        return False
    return True


def findings(config: Config) -> list[Finding]:
    """Everything about this node, in the order in which it is shown."""
    status = read("/proc/self/status") or ""
    effective = features.parse_capabilities(status)
    release, machine = os.uname().release, os.uname().machine
    found = [features.kernel(release, machine)]
    has_btf = Path(BTF).exists()
    found.append(features.btf(has_btf))
    found += _bpf_findings(machine, release, config.sources)
    found.append(_cgroups())
    counters = config.cpu.counters
    found.append(features.pmu(perf.self_test(counters)))
    found.append(features.perf_paranoid(_number("/proc/sys/kernel/perf_event_paranoid"), effective))
    found.append(features.capabilities(effective))
    found.append(features.seccomp(_filtered(status)))
    found.append(features.lockdown(read("/sys/kernel/security/lockdown")))
    may_raise = features.may_raise_limits(effective)
    found.append(features.memlock(release, *resource.getrlimit(resource.RLIMIT_MEMLOCK), may_raise))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    found.append(features.descriptors(*files, len(cpus.online()), len(counters), may_raise))
    found.append(features.unprivileged_bpf(_number("/proc/sys/kernel/unprivileged_bpf_disabled")))
    found.append(features.pid_namespace(_inode("/proc/self/ns/pid"), _levels(status)))
    found.append(features.user_namespace(_inode("/proc/self/ns/user")))
    found.append(features.filesystems())
    found.append(features.headers(Path(f"/lib/modules/{release}/build").exists(), has_btf))
    delays = _number("/proc/sys/kernel/task_delayacct")
    found.append(features.delay_accounting(delays, config.sources.delays))
    found += gpu_probe.findings(config, _socket_state(config.gpu.pod_resources))
    address = config.controller.address
    found.append(features.controller(address, _unreachable(address) if address else ""))
    found.append(features.agent(config.agent.socket, _socket_state(config.agent.socket)))
    return found


def _filtered(status: str) -> bool:
    return "\nSeccomp:\t2" in status


def _levels(status: str) -> int:
    """How many pid namespaces see this process, counted from the one in which /proc was mounted."""
    line = next((line for line in status.split("\n") if line.startswith("NSpid:")), "NSpid: 1")
    return len(line.split()) - 1


def explain(code: int) -> str:
    """Cause and remedy, here and now, of error `code` from loading BPF programs."""
    status = read("/proc/self/status") or ""
    return features.explain_load_error(
        code,
        platform.release(),
        features.parse_capabilities(status),
        read("/sys/kernel/security/lockdown"),
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        _filtered(status),
    )


def _bpf_findings(machine: str, release: str, wanted: SourcesConfig) -> list[Finding]:
    try:
        version: str | None = libbpf.version()
    except UnavailableError:
        version = None
    names = [f"{name}.{machine}.bpf.o" for name in OBJECTS]
    shipped = [name for name in names if (libbpf.OBJECTS / name).exists()]
    program, ring = trials.load_trivial_program(), trials.make_ring_buffer()
    found = [
        features.libbpf(version),
        features.objects(shipped, names),
        features.bpf_part("bpf programs", program, explain(program)),
        features.bpf_part("bpf ring buffer", ring, explain(ring)),
    ]
    if version is not None and not program:  # else they say nothing of the kernel
        found += [
            features.ability("bpf_loop", trials.load_loop(), release),
            features.ability("uprobe_multi links", trials.link_uprobe_multi(), release),
            features.ability("sleepable task iterator", trials.link_sleepable_task_iterator(), release),
            features.ability("attach cookies", trials.load_attach_cookie(), release),
        ]
    if version is not None and shipped == names and not program and not ring:
        code, what = load_objects()
        found.append(
            features.bpf_part("collector's programs", code, f"{what}: {explain(code)}" if code else "")
        )
        why_not, waiting = load_python_stacks() if wanted.python else ("", 0)
        found.append(features.python_stacks(wanted.python, why_not, waiting, release))
        why_not, method = load_gpu_calls() if wanted.traces else ("", "")
        found.append(features.deep_traces(wanted.traces, why_not, method))
        if wanted.traces and not why_not:
            found.append(features.kernel_names(has_bcc()))
    return found


def _cgroups() -> Finding:
    try:
        mounted = hierarchies.mounted()
        return features.cgroups(hierarchies.mode(mounted), [h.name for h in mounted if not h.named])
    except UnavailableError as error:
        return features.cgroups(None, (), str(error))


def _unreachable(address: str) -> str:
    """Why no TCP connection to the controller can be made; empty when it can."""
    try:
        host, port = configuration.split_address(address, "controller.address")
        socket.create_connection((host, port), CONNECT_S).close()
    except ConfigError as error:
        return str(error)
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return error.strerror or "connection failed"
    except UnicodeError:
        return "the host's name is not valid"
    return ""


def _socket_state(path: str) -> Literal["running", "absent", "stale", "denied"]:
    """Whether anybody answers on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(CONNECT_S)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return "stale"
        except PermissionError:
            return "denied"
        except OSError:
            return "absent"
    return "running"
