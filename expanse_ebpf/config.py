"""The one configuration: TOML file, then EXPANSE_* environment variables, then flags.

Every setting is a field of `Config` here, with its default and its meaning. In the file the settings
stand in tables named as in `TABLES`; the environment variable of `[agent] interval_s` is
`EXPANSE_AGENT_INTERVAL_S`.
"""

from __future__ import annotations

import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from expanse_ebpf.errors import ConfigError

DEFAULT_FILE = Path("/etc/expanse-ebpf/config.toml")
COUNTERS = ("cycles", "instructions", "cache_references", "cache_misses", "branch_misses")
MAX_RATE_HZ = 999  # of samples of Python stacks


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The node agent."""

    interval_s: float = 1.0  # seconds between reports, 0.1 to 3600
    socket: str = "/run/expanse-ebpf/agent.sock"  # the node's Unix socket
    node_name: str = ""  # empty: NODE_NAME from the environment, else the host name
    state_dir: str = "/var/lib/expanse-ebpf"  # holds the installation's id
    metrics_listen: str = ""  # HOST:PORT for Prometheus; empty: none
    max_jobs: int = 1000  # jobs past this number are added up as "overflow"


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Where reports go."""

    address: str = ""  # HOST:PORT; empty: nothing is sent
    max_unsent: int = 3600  # reports held in memory while it cannot be reached


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """CPU events per job."""

    counters: tuple[str, ...] = COUNTERS  # hardware counters to open; empty: none
    hierarchy: str = "auto"  # the cgroup hierarchy that tells jobs apart, e.g. "unified", "freezer"
    mode: str = "auto"  # auto: without the scheduler hook where jobs own their CPUs; hook: always with it
    # When the kernel measures the BPF programs' own run time, which itself costs a little on every
    # run: sampled (one tick in `bpf_stats_every`) | always | off
    bpf_stats: str = "sampled"
    bpf_stats_every: int = 30


@dataclass(frozen=True, slots=True)
class SourcesConfig:
    """Sources that can be switched on and off."""

    cpu: bool = True
    cgroup: bool = True
    host: bool = True
    python: bool = True  # Python stacks, see PythonConfig
    gpu: bool = True  # NVIDIA GPUs, see GpuConfig
    network: bool = False  # by parts of pyroute2: 2.4 MiB of memory, 4.2 MiB without gRPC
    delays: bool = False  # likewise: 1.5 or 8.7 MiB; needs kernel.task_delayacct=1
    traces: bool = True  # deep traces of GPU calls, see TracingConfig; nothing is there until one is opened


@dataclass(frozen=True, slots=True)
class PythonConfig:
    """Python stacks: how often they are taken, and of which jobs.

    A job is profiled when it matches one of `jobs`, one of `users` where any are given, and one of
    `namespaces` where any are given; all are shell patterns. Others are while somebody looks at them. A
    process opts out by EXPANSE_PROFILE=off in its environment.
    """

    rate_hz: int = 49  # samples per second of each CPU, 1 to 999
    waits_hz: int = 4  # looks per second at threads that wait, 0 (none) to 20
    jobs: tuple[str, ...] = ("*",)  # keys, e.g. "slurm/*"; empty: none
    users: tuple[str, ...] = ()  # names or numbers; empty: any
    namespaces: tuple[str, ...] = ()  # of Kubernetes; empty: any, and jobs of other kinds


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """NVIDIA GPUs. Without a driver on the node there are no figures and no cost."""

    profiler: bool = False  # activity of SMs, pipes and memory by GPM (Hopper or later)
    # NVML where it is not among the system's libraries, e.g. in a driver container; empty: libnvidia-ml.so.1
    library: str = ""
    # Without an answer for so long the process that asks NVML is ended, and another one begun.
    deadline_s: float = 5.0
    # The kubelet's word on which pod holds which GPU; empty: not asked
    pod_resources: str = "/var/lib/kubelet/pod-resources/kubelet.sock"


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """Deep traces: windows in which every CUDA and NCCL call of a job is seen, and what they may cost.

    Who asks for a window may set its length, up to `max_window_s`, and the two shares; a rule's window
    keeps to these.
    """

    commands: bool = True  # whether the controller may open windows here
    window_s: float = 25.0  # seconds of a window when nothing else is asked for
    max_window_s: float = 120.0
    pause_s: float = 60.0  # from the end of a job's window to the next one that a rule may open
    run_share: float = 0.3  # most of a job's run that may lie in windows
    cost_share: float = 0.02  # most of a traced thread's time that a window may take
    over_cost: str = (
        "cycle"  # over it the probes are taken off and on again ("cycle"), or the window ends ("close")
    )
    max_events: int = 200_000  # kept of a window and node; the rest is counted


@dataclass(frozen=True, slots=True)
class JobsConfig:
    """What counts as a job."""

    # systemd units that are jobs, and those of them that are not (shell patterns)
    units: tuple[str, ...] = ("*.service", "*.scope")
    units_exclude: tuple[str, ...] = (
        "systemd-*",
        "init.scope",
        "session-*.scope",
        "user@*",
        "dbus*",
        "getty@*",
        "serial-getty@*",
        "ssh*",
        "slurm*",
        "munge*",
        "docker.service",
        "containerd.service",
        "crio.service",
        "k3s*",
        "kubelet.service",
        "expanse-*",
    )
    pods_url: str = ""  # the kubelet's list of pods, e.g. http://127.0.0.1:10255/pods


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """The benchmark kit."""

    send_url: str = ""  # where `bench send` sends results when its user agrees; empty: nowhere


@dataclass(frozen=True, slots=True)
class Config:
    """All settings."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    sources: SourcesConfig = field(default_factory=SourcesConfig)
    python: PythonConfig = field(default_factory=PythonConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)


TABLES = {f.name: typing.cast(type[Any], f.default_factory) for f in fields(Config)}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _convert(value: Any, kind: Any, where: str) -> Any:
    """A TOML value, or a string from the environment or a flag, as `kind`; raises ConfigError."""
    origin = typing.get_origin(kind)
    try:
        if origin is tuple:
            items = (
                [part.strip() for part in value.split(",") if part.strip()]
                if isinstance(value, str)
                else value
            )
            if (
                isinstance(items, bool)
                or not isinstance(items, list)
                or not all(isinstance(i, str) for i in items)
            ):
                raise ValueError("a list of strings is wanted")
            return tuple(items)
        if kind is bool:
            if isinstance(value, bool):
                return value
            text = str(value).lower()
            if text in _TRUE + _FALSE:
                return text in _TRUE
            raise ValueError("true or false is wanted")
        if isinstance(value, (bool, list, dict, types.NoneType)):
            raise ValueError(f"a {'number' if kind in (int, float) else 'string'} is wanted")
        if kind is str and not isinstance(value, str):
            raise ValueError("a string is wanted")
        if kind is int and isinstance(value, float):
            raise ValueError("a whole number is wanted")
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {value!r} is not valid: {error}") from None


def _checked(config: Config) -> Config:
    """`config` itself when its values make sense together; raises ConfigError."""
    a, c = config.agent, config.cpu
    if not 0.1 <= a.interval_s <= 3600:
        raise ConfigError(f"agent.interval_s: {a.interval_s} is not between 0.1 and 3600 seconds")
    if a.max_jobs < 1:
        raise ConfigError(f"agent.max_jobs: {a.max_jobs} is less than 1")
    if config.controller.max_unsent < 1:
        raise ConfigError(f"controller.max_unsent: {config.controller.max_unsent} is less than 1")
    unknown = sorted(set(c.counters) - set(COUNTERS))
    if unknown:
        raise ConfigError(
            f"cpu.counters: {', '.join(map(repr, unknown))} is not one of {', '.join(COUNTERS)}"
        )
    for name, value, allowed in (
        ("cpu.mode", c.mode, ("auto", "hook")),
        ("cpu.bpf_stats", c.bpf_stats, ("sampled", "always", "off")),
        ("tracing.over_cost", config.tracing.over_cost, ("cycle", "close")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
    if c.bpf_stats_every < 2:
        raise ConfigError(
            f"cpu.bpf_stats_every: {c.bpf_stats_every} is less than 2 (use bpf_stats = 'always')"
        )
    for name, number, least, most in (
        ("python.rate_hz", config.python.rate_hz, 1, MAX_RATE_HZ),
        ("python.waits_hz", config.python.waits_hz, 0, 20),
    ):
        if not least <= number <= most:
            raise ConfigError(f"{name}: {number} is not between {least} and {most}")
    if not 0.5 <= config.gpu.deadline_s <= 600:
        raise ConfigError(f"gpu.deadline_s: {config.gpu.deadline_s} is not between 0.5 and 600 seconds")
    t = config.tracing
    for name, quantity, low, high in (
        ("tracing.max_window_s", t.max_window_s, 1, 3600),
        ("tracing.window_s", t.window_s, 0.1, t.max_window_s),
        ("tracing.pause_s", t.pause_s, 0, 86400),
        ("tracing.run_share", t.run_share, 0.001, 1),
        ("tracing.cost_share", t.cost_share, 0.0001, 1),
        ("tracing.max_events", t.max_events, 1000, 2_000_000),
    ):
        if not low <= quantity <= high:
            raise ConfigError(f"{name}: {quantity} is not between {low} and {high}")
    for name, path in (("gpu.library", config.gpu.library), ("gpu.pod_resources", config.gpu.pod_resources)):
        if path and not path.startswith("/"):
            raise ConfigError(f"{name}: {path!r} is not an absolute path")
    for name, address in (
        ("agent.metrics_listen", a.metrics_listen),
        ("controller.address", config.controller.address),
    ):
        if address:
            split_address(address, name)
    if config.bench.send_url:
        check_url(config.bench.send_url, "bench.send_url")
    return config


def split_address(address: str, where: str) -> tuple[str, int]:
    """HOST:PORT or [IPV6]:PORT as (host, port); raises ConfigError that begins with `where`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{where}: {address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_url(url: str, where: str) -> None:
    """Raises ConfigError that begins with `where` for all but an http(s):// URL without a user's name."""
    from urllib.parse import urlsplit  # which the agent can do without

    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # a port that is none raises ValueError
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("https", "http") or not re.fullmatch("[!-~]+", url):
        raise ConfigError(f"{where}: {url!r:.80} is not a URL that begins with https:// or http://")
    if "@" in parts.netloc:
        raise ConfigError(f"{where}: the URL has a user's name or a password in it; leave them out")


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration from the file, the environment and `overrides` ("agent.interval_s" to value).

    `file` None means DEFAULT_FILE where it exists. Overrides that are None do not count. Raises
    ConfigError for anything unknown, unreadable or out of range.
    """
    environment = os.environ if environment is None else environment
    values: dict[tuple[str, str], tuple[str, Any]] = {}  # (table, field) to (where it was said, value)
    path = file or DEFAULT_FILE
    if file is not None or path.exists():
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give another file with --config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        for table, content in document.items():
            if table not in TABLES or not isinstance(content, dict):
                raise ConfigError(f"{path}: [{table}] is not one of the tables {', '.join(TABLES)}")
            for name, value in content.items():
                values[table, name] = (f"{path}: {table}.{name}", value)
    for table in TABLES:
        prefix = f"EXPANSE_{table}_".upper()
        for variable in [name for name in environment if name.startswith(prefix)]:
            # An unknown name is refused below like any other.
            setting = variable.removeprefix(prefix).lower()
            values[table, setting] = (variable, environment[variable])
    for name, value in (overrides or {}).items():
        if value is not None:
            table, _, setting = name.partition(".")
            values[table, setting] = (name, value)
    tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    for (table, name), (where, value) in values.items():
        kinds = typing.get_type_hints(TABLES[table])
        if name not in kinds:
            raise ConfigError(f"{where}: no such setting; [{table}] has {', '.join(kinds)}")
        tables[table][name] = _convert(value, kinds[name], where)
    config = Config()
    return _checked(
        replace(
            config, **{table: replace(getattr(config, table), **content) for table, content in tables.items()}
        )
    )
