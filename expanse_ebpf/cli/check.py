"""`expanse-ebpf check`: what this node can and cannot do, and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

_WORDS = {"ok": "ok", "warning": "warn", "missing": "fail"}


@click.command("check", short_help="Say what this node can and cannot do, and why.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: `can_run` and the list `findings`.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="The configuration file.")
def command(as_json: bool, file: Path | None) -> None:
    """Say what this node can and cannot do for the collector, and why, one line each.

    Exit code 0 when the collector can run, 1 when something that it needs is missing. A warning means
    that a part is off; the rest works.

    \b
    Examples:
      expanse-ebpf check
      expanse-ebpf check --json | jq '.findings[] | select(.status != "ok")'
    """
    from expanse_ebpf import config
    from expanse_ebpf.kernel import probe

    findings = probe.findings(config.load(file))
    missing = [finding for finding in findings if finding.status == "missing"]
    if as_json:
        document = {"can_run": not missing, "findings": [finding._asdict() for finding in findings]}
        click.echo(json.dumps(document, indent=2))
    else:
        for finding in findings:
            remedy = f" — {finding.remedy}" if finding.remedy else ""
            click.echo(f"{_WORDS[finding.status]:4} {finding.name}: {finding.detail}{remedy}")
        names = ", ".join(finding.name for finding in missing)
        click.echo(f"the collector cannot run: {names}" if missing else "the collector can run")
    sys.exit(1 if missing else 0)
