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

from expanse_controller import cli_options, cli_rules
from expanse_controller.errors import ControllerError
from expanse_ebpf.wire.service_manager import ServiceManager
from expanse_ebpf.wire.transport import DEFAULT_PORT

PR_SET_PDEATHSIG = 1


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
@cli_options.address(
    "--listen", "Where nodes and questions come in; port 0 takes any free one.", f"127.0.0.1:{DEFAULT_PORT}"
)
@cli_options.db
@cli_options.address("--metrics-listen", "Where Prometheus may scrape; not set: nowhere.")
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
@click.option(
    "--rules",
    "rules_file",
    type=click.Path(path_type=Path),
    help="Rules to look at instead of those that come with it; see `rules --help`.",
)
@click.option("--no-rules", is_flag=True, help="Look at no rules.")
@click.option("--parent-death", is_flag=True, help="End when the process that started this one ends.")
def serve(
    listen: tuple[str, int],
    db: Path,
    metrics_listen: tuple[str, int] | None,
    keep_days: float,
    announce: int | None,
    rules_file: Path | None,
    no_rules: bool,
    parent_death: bool,
) -> None:
    """Take in reports until SIGTERM or SIGINT.

    \b
    Examples:
      expanse-controller serve
      expanse-controller serve --listen 0.0.0.0:9777 --db /srv/reports.db
      expanse-controller serve --keep-days 30
      expanse-controller serve --metrics-listen 127.0.0.1:9778
      expanse-controller serve --rules /etc/expanse-ebpf/rules.yaml
    """
    if no_rules and rules_file:
        raise click.UsageError("--rules and --no-rules exclude each other", click.get_current_context())
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
        rules = [] if no_rules else cli_rules.load(rules_file)
        asyncio.run(server.serve(db, listen, metrics_listen, keep_days * 86400, listening, rules))
    except ControllerError as error:
        raise click.ClickException(str(error)) from None


main.add_command(cli_rules.group)
