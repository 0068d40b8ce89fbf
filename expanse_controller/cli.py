"""The expanse-controller command."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from expanse_controller.errors import ControllerError
from expanse_ebpf.wire.service_manager import ServiceManager
from expanse_ebpf.wire.transport import DEFAULT_PORT

if TYPE_CHECKING:
    from expanse_controller.rules.rule import Rule

PR_SET_PDEATHSIG = 1
ANSWER_S = 30.0  # for a question to the running controller
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
      expanse-controller serve --listen 0.0.0.0:9777 --db /srv/expanse.db --keep-days 30
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
        rules = [] if no_rules else _rules(rules_file)
        asyncio.run(server.serve(db, listen, metrics_listen, keep_days * 86400, listening, rules))
    except ControllerError as error:
        raise click.ClickException(str(error)) from None


# ---- rules


def _rules(file: Path | None) -> list[Rule]:
    """Those of `file`, else those that come with the controller. Raises ControllerError."""
    from expanse_controller.rules import rule

    return rule.load(file) if file else rule.shipped()


def _time(_: click.Context, __: click.Parameter, value: str | None) -> int:
    """Nanoseconds since the epoch, 0 for none."""
    if value is None:
        return 0
    from datetime import datetime

    from expanse_controller.rules.rule import duration_s

    seconds = duration_s(value)
    if seconds is not None:
        return max(1, time.time_ns() - int(seconds * 1e9))
    try:
        return max(1, int(datetime.fromisoformat(value).timestamp() * 1e9))
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(f"{value!r} is neither a time (2026-01-31T12:00) nor an age (90m)") from None


_FILE = click.Path(path_type=Path, dir_okay=False)
_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


@main.group()
def rules() -> None:
    """What the controller looks for in every job's figures, and what it does then; see docs/rules.md."""


@rules.command("check")
@click.argument("file", type=_FILE)
@_as_json
def rules_check(file: Path, as_json: bool) -> None:
    """Check a file of rules: its faults, line by line, and exit code 1, or what is in it.

    \b
    Example:
      expanse-controller rules check rules.yaml
    """
    from expanse_controller.rules import rule, words

    try:
        found = rule.parse(rule.read(file))
    except ControllerError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        faults = [fault._asdict() for fault in found.faults]
        click.echo(json.dumps({"rules": [words.of_rule(one) for one in found.rules], "faults": faults}))
    elif found.faults:
        for fault in found.faults:
            click.echo(f"{file}:{fault.line}: {fault.text}")
    else:
        click.echo(words.rules(found.rules))
    if found.faults:
        click.get_current_context().exit(1)


@rules.command("list")
@click.option("--rules", "file", type=_FILE, help="A file of rules; not given: those that come with it.")
@_as_json
def rules_list(file: Path | None, as_json: bool) -> None:
    """Show the rules and the figures that they may ask for.

    \b
    Examples:
      expanse-controller rules list
      expanse-controller rules list --json
    """
    from expanse_controller.rules import words

    try:
        found = _rules(file)
    except ControllerError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        known = words.of_figures()
        click.echo(json.dumps({"rules": [words.of_rule(one) for one in found], "figures": known}))
    else:
        click.echo(f"{words.rules(found)}\n\n{words.figures()}")


@rules.command("dry-run")
@click.option(
    "--db", type=click.Path(path_type=Path), default=DEFAULT_DB, show_default=True, help="The store."
)
@click.option("--from", "from_ns", metavar="TIME", callback=_time, help="A time, or an age such as 2h or 1d.")
@click.option("--to", "to_ns", metavar="TIME", callback=_time, help="Likewise; not given: to the end.")
@click.option("--rules", "file", type=_FILE, help="A file of rules; not given: those that come with it.")
@_as_json
def rules_dry_run(db: Path, from_ns: int, to_ns: int, file: Path | None, as_json: bool) -> None:
    """Show what rules would have done over what is stored. A running controller is not disturbed.

    \b
    Examples:
      expanse-controller rules dry-run --from 1d
      expanse-controller rules dry-run --rules rules.yaml --from 2026-01-31T12:00 --to 2026-01-31T18:00
    """
    from expanse_controller.rules import words
    from expanse_controller.rules.dry_run import dry_run

    try:
        run = dry_run(db, _rules(file), from_ns, to_ns)
    except ControllerError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(words.of_dry_run(run)) if as_json else words.dry_run(run))


@rules.command("show")
@click.option(
    "--controller",
    metavar="HOST:PORT",
    callback=_address,
    default=f"127.0.0.1:{DEFAULT_PORT}",
    show_default=True,
    help="The controller.",
)
@_as_json
def rules_show(controller: tuple[str, int], as_json: bool) -> None:
    """Show how each rule stands with each job, those that fire first.

    \b
    Example:
      expanse-controller rules show --controller ctl.example.org:9777
    """
    import grpc

    from expanse_controller.rules import words
    from expanse_ebpf.wire import transport
    from expanse_ebpf.wire.collector_pb2 import RulesReply, RulesRequest

    host, port = controller
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(address, options=transport.client_options()) as channel:
        call = channel.unary_unary(transport.RULES, RulesRequest.SerializeToString, RulesReply.FromString)
        try:
            states = call(RulesRequest(), timeout=ANSWER_S).states
        except grpc.RpcError as error:
            reason = error.details() if isinstance(error, grpc.Call) else str(error)
            raise click.ClickException(
                f"the controller at {address} does not answer: {reason}; give another one with --controller"
            ) from None
    found = [words.of_state(state) for state in states]
    click.echo(json.dumps({"states": found}) if as_json else words.states(found))
