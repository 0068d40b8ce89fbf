"""The expanse-controller command."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from expanse_controller.errors import ControllerError
from expanse_ebpf.wire.service_manager import ServiceManager
from expanse_ebpf.wire.transport import DEFAULT_PORT

PR_SET_PDEATHSIG = 1
DEFAULT_DB = Path("/var/lib/expanse-controller/reports.db")


def _address(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, _colon, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


class _OneLineErrors(click.Group):
    """A group whose errors are one line each."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run it and exit."""
        options |= {"prog_name": "expanse-controller", "standalone_mode": False}
        try:
            code = super().main(*args, **options)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
            hint = f"; see {where} --help" if where else ""
            click.echo(f"error: {error.format_message().rstrip('.')}{hint}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


async def _give_signs(service: ServiceManager) -> None:
    import asyncio

    while True:
        await asyncio.sleep(service.alive())


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    package_name="expanse-ebpf", prog_name="expanse-controller", message="%(prog)s %(version)s"
)
def main() -> None:
    """Collect the reports of every node, keep them, and answer questions about them."""


@main.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=_address,
    default=f"127.0.0.1:{DEFAULT_PORT}",
    show_default=True,
    help="Where nodes and questions come in; port 0 takes any free one.",
)
@click.option(
    "--db", type=click.Path(path_type=Path), default=DEFAULT_DB, show_default=True, help="The store."
)
@click.option(
    "--metrics-listen",
    metavar="HOST:PORT",
    callback=_address,
    help="Where Prometheus may scrape; not set: nowhere.",
)
@click.option(
    "--keep-days",
    type=click.FloatRange(min=0.001),
    default=7.0,
    show_default=True,
    help="How long samples are kept.",
)
@click.option(
    "--announce",
    type=click.IntRange(min=0),
    metavar="FD",
    help="Write one line of JSON with the addresses to this descriptor once they are taken.",
)
@click.option("--parent-death", is_flag=True, help="End when the process that started this one ends.")
def serve(
    listen: tuple[str, int],
    db: Path,
    metrics_listen: tuple[str, int] | None,
    keep_days: float,
    announce: int | None,
    parent_death: bool,
) -> None:
    """Take in reports until SIGTERM or SIGINT.

    \b
    Examples:
      expanse-controller serve
      expanse-controller serve --listen 0.0.0.0:9777 --db /srv/expanse.db --keep-days 30
      expanse-controller serve --metrics-listen 127.0.0.1:9778
    """
    service = ServiceManager()
    if parent_death:
        # Told by the kernel when the thread that started this process ends. If it is gone already,
        # nobody reads what is announced, and that ends the controller too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    logging.basicConfig(format="expanse-controller: %(message)s", level=logging.INFO)
    logging.getLogger("grpc").setLevel(logging.ERROR)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import asyncio

    from expanse_controller import server

    tasks: list[asyncio.Task[None]] = []  # the loop itself holds a task weakly

    def listening(at: server.Listening) -> None:
        if announce is not None:
            line = json.dumps({"listen": at.listen, "metrics": at.metrics, "pid": os.getpid()})
            try:
                with open(announce, "w", encoding="ascii") as stream:
                    stream.write(line + "\n")
            except OSError as error:
                raise ControllerError(f"--announce {announce}: {error.strerror}; nobody reads it") from None
        metrics = f", metrics on {at.metrics}" if at.metrics else ""
        said = f"listening on {at.listen}{metrics}, store {db}"
        click.echo(f"expanse-controller: {said}")
        service.status(said)
        service.ready()
        tasks.append(asyncio.create_task(_give_signs(service)))

    try:
        try:
            db.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ControllerError(
                f"{db.parent} cannot be made: {error.strerror}; give another file with --db"
            ) from None
        asyncio.run(server.serve(db, listen, metrics_listen, keep_days * 86400, listening))
    except ControllerError as error:
        raise click.ClickException(str(error)) from None
