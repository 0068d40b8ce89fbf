"""`expanse-ebpf traces`: the windows that a controller has stored."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from expanse_ebpf import config
from expanse_ebpf.cli.trace import job_keys, settings, write
from expanse_ebpf.cli.trace_file import PerfettoFile
from expanse_ebpf.errors import ConfigError, UnavailableError, UnknownJobError

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import StoredTrace

HEADINGS = ("WINDOW", "JOB", "NODE", "WHEN (UTC)", "OPENED BY", "STATE", "LAUNCHES", "SIZE", "REASON")


@click.command(
    "traces",
    short_help="List and fetch the traces that a controller has.",
    epilog="""\b
Examples:
  expanse-ebpf traces --controller head:9777      the newest of all jobs
  expanse-ebpf traces slurm/123 --json            those of one, for scripts
  expanse-ebpf traces --window 8c1f0a9d2b7e4410   one of them: its summary
  expanse-ebpf traces --window 8c1f0a9d2b7e4410 -o 123.pftrace""",
)
@click.argument("key", metavar="[JOB]", required=False, shell_complete=job_keys)
@click.option("-w", "--window", metavar="ID", help="Fetch this window: its summary, on all its nodes.")
@click.option("-o", "--output", metavar="FILE", help="(with --window) Write a Perfetto trace too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="List no more.")
@click.option("--controller", metavar="HOST:PORT", help="Which controller.  [default: controller.address]")
def command(
    key: str | None, window: str | None, output: str | None, as_json: bool, limit: int, controller: str | None
) -> None:
    """List the windows of JOB, or of all jobs, that a controller has stored; fetch one of them.

    The exit code is 0, or 3 when there is no such window; that of a window without a trace is as with
    `expanse-ebpf trace`.
    """
    from expanse_ebpf.wire.keys import parse_key

    if key is not None:
        parse_key(key)
    if window is not None and not re.fullmatch(r"[0-9a-f]{16}", window):
        raise ConfigError(f"--window: {window[:80]!r} is no window's id: 16 hexadecimal digits")
    if key is not None and window is not None:
        raise ConfigError("give either JOB, to list its windows, or --window ID")
    if output is not None and window is None:
        raise ConfigError("-o needs --window ID; without it the windows are listed")
    file = PerfettoFile(output) if output is not None else None
    address = controller or settings().controller.address
    if not address:
        raise ConfigError("windows are stored by a controller: give --controller HOST:PORT")
    config.split_address(address, "--controller")
    if window is not None:
        _fetch(address, window, file, as_json)
    else:
        _list(address, key or "", limit, as_json)


def _fetch(address: str, window: str, file: PerfettoFile | None, as_json: bool) -> None:
    from expanse_ebpf.cli.trace_session import Windows, job_key
    from expanse_ebpf.ship import remote

    windows = Windows()
    for reply in remote.stored_traces(address, window):
        windows.add(reply)
    if not windows.statuses:
        raise UnknownJobError(
            f"controller {address} has no window {window}; `expanse-ebpf traces` lists those it has"
        )
    title = next(job_key(status.identity) for status in windows.statuses.values())
    write(title, windows, file, as_json, address)


def _list(address: str, key: str, limit: int, as_json: bool) -> None:
    from expanse_ebpf.ship import remote
    from expanse_ebpf.top import text

    stored = remote.traces(address, key, limit=limit)
    if sys.stdout is None:
        raise UnavailableError("standard output is closed; give traces somewhere to write to")
    if as_json:
        listed = json.dumps([_as_json(one) for one in stored], indent=2, allow_nan=False)
        click.echo(listed.replace("\x7f", "\\u007f"))
    elif stored:
        click.echo("\n".join(table([_row(one) for one in stored])))
    else:
        whose = f" of {text.clean(key)}" if key else ""
        click.echo(f"controller {address} has stored no window{whose}", err=True)


def _as_json(stored: StoredTrace) -> dict[str, Any]:
    from expanse_ebpf.cli.trace_session import job_key, status_as_json

    return {
        "window": stored.status.id,
        "job": job_key(stored.status.identity),
        **status_as_json(stored.node, stored.status),
        "evidence": [
            {"name": seen.name, "value": seen.value if seen.HasField("value") else seen.text or None}
            for seen in stored.evidence
        ],
        "bytes": stored.bytes or None,
    }


def _row(stored: StoredTrace) -> tuple[str, ...]:
    from expanse_ebpf.cli.trace_session import begun_yet, job_key, state_name
    from expanse_ebpf.top import text

    status = stored.status
    return (
        status.id,
        job_key(status.identity),
        stored.node,
        when(status.from_ns or status.start_ns),
        status.rule or "asked for",
        state_name(status),
        f"{status.launches:,}" if begun_yet(status) else "-",
        text.size(stored.bytes) if stored.bytes else "-",
        status.reason,
    )


def when(time_ns: int) -> str:
    """A time in UTC, to the second; a dash for 0 and for what no clock shows."""
    if not 0 < time_ns < 1 << 62:
        return "-"
    return f"{datetime.fromtimestamp(time_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S}"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows under their headings, in columns as wide as their longest entry."""
    from expanse_ebpf.top import text

    cleaned = [HEADINGS, *(tuple(map(text.clean, row)) for row in rows)]
    widths = [max(map(text.cell_width, column)) for column in zip(*cleaned, strict=True)]
    right = [heading in ("LAUNCHES", "SIZE") for heading in HEADINGS]
    return ["  ".join(map(text.fit, row, widths, right)).rstrip() for row in cleaned]
