"""Options that several commands of expanse-controller have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_DB = Path("/var/lib/expanse-controller/reports.db")

db = click.option(
    "--db", type=click.Path(path_type=Path), default=DEFAULT_DB, show_default=True, help="The store."
)


def address(flag: str, said: str, default: str | None = None) -> Callable[..., Any]:
    """An option HOST:PORT; the command gets (host, port), None where it is not given and has no default."""
    return click.option(
        flag, metavar="HOST:PORT", callback=_address, default=default, show_default=True, help=said
    )


def _address(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, _colon, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
