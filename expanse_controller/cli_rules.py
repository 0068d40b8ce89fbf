"""`expanse-controller rules`: what rules there are, how they stand, what they would have done."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from expanse_controller import cli_options
from expanse_controller.errors import ControllerError
from expanse_ebpf.wire.transport import DEFAULT_PORT

if TYPE_CHECKING:
    from expanse_controller.rules.rule import Rule
    from expanse_ebpf.wire.collector_pb2 import RuleState

ANSWER_S = 30.0  # for a question to the running controller
PIPED_WIDTH = 80

_FILE = click.Path(path_type=Path, dir_okay=False)
_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
_of_file = click.option(
    "--rules", "file", type=_FILE, help="A file of rules; not given: those that come with it."
)
_everything = click.option("--all", "everything", is_flag=True, help="With what has no data.")


def _a_key(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    from expanse_ebpf.wire import keys

    try:
        if value is not None:
            keys.parse_key(value)
    except keys.BadKeyError as error:
        raise click.BadParameter(str(error)) from None
    return value


_job = click.option("--job", metavar="KEY", callback=_a_key, help="Of this job alone, all that there is.")


def load(file: Path | None) -> list[Rule]:
    """Those of `file`, else those that come with the controller. Raises ControllerError."""
    from expanse_controller.rules import rule

    return rule.load(file) if file else rule.shipped()


@click.group("rules", short_help="What is looked for in every job's figures.")
def group() -> None:
    """What the controller looks for in every job's figures, and what it does then; see docs/rules.md."""


@group.command("check", short_help="Check a file of rules.")
@click.argument("file", type=_FILE)
@_as_json
def check(file: Path, as_json: bool) -> None:
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
        click.echo(words.rules(found.rules, _width()))
    if found.faults:
        click.get_current_context().exit(1)


@group.command("list", short_help="Show the rules and the figures that they may ask for.")
@_of_file
@_as_json
def list_(file: Path | None, as_json: bool) -> None:
    """Show the rules and the figures that they may ask for.

    \b
    Examples:
      expanse-controller rules list
      expanse-controller rules list --json
    """
    from expanse_controller.rules import words

    try:
        found = load(file)
    except ControllerError as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        known = words.of_figures()
        click.echo(json.dumps({"rules": [words.of_rule(one) for one in found], "figures": known}))
    else:
        click.echo(f"{words.rules(found, _width())}\n\n{words.figures(_width())}")


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


@group.command("dry-run", short_help="Show what rules would have done over what is stored.")
@cli_options.db
@click.option("--from", "from_ns", metavar="TIME", callback=_time, help="A time, or an age such as 2h or 1d.")
@click.option("--to", "to_ns", metavar="TIME", callback=_time, help="Likewise; not given: to the end.")
@_of_file
@_job
@_everything
@_as_json
def dry_run(
    db: Path,
    from_ns: int,
    to_ns: int,
    file: Path | None,
    job: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show what rules would have done over what is stored. A running controller is not disturbed.

    \b
    Examples:
      expanse-controller rules dry-run --from 1d
      expanse-controller rules dry-run --rules rules.yaml --job slurm/123
      expanse-controller rules dry-run --from 2026-01-31T12:00 --to 2026-02-01
    """
    from expanse_controller.rules import words
    from expanse_controller.rules.dry_run import dry_run

    try:
        run = dry_run(db, load(file), from_ns, to_ns)
    except ControllerError as error:
        raise click.ClickException(str(error)) from None
    if job:
        run = run._replace(
            fired=[fired for fired in run.fired if _is_of(fired.firing.key, job)],
            seconds={place: spent for place, spent in run.seconds.items() if _is_of(place[1], job)},
        )
    if as_json:
        click.echo(json.dumps(words.of_dry_run(run)))
    elif job and run.looks and not run.seconds:
        click.echo(f"no samples of {job} in that time")
    else:
        click.echo(words.dry_run(run, everything or bool(job)))


@group.command("show", short_help="Show how each rule stands with each job.")
@cli_options.address("--controller", "The controller.", f"127.0.0.1:{DEFAULT_PORT}")
@_job
@_everything
@_as_json
def show(controller: tuple[str, int], job: str | None, everything: bool, as_json: bool) -> None:
    """Show how each rule stands with each job, those that fire first.

    \b
    Examples:
      expanse-controller rules show --controller ctl.example.org:9777
      expanse-controller rules show --job slurm/123
    """
    from expanse_controller.rules import words

    host, port = controller
    states = _states(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    found = [words.of_state(state) for state in states if not job or _is_of(state.key, job)]
    if as_json:
        click.echo(json.dumps({"states": found}))
    elif job and not found:
        click.echo(f"no rule has looked at {job} yet")
    else:
        click.echo(words.states(found, everything or bool(job)))


def _states(address: str) -> list[RuleState]:
    """What the controller at `address` says. Raises click.ClickException."""
    from expanse_ebpf.wire import transport
    from expanse_ebpf.wire.collector_pb2 import RulesReply, RulesRequest
    from expanse_ebpf.wire.failure import cause

    grpc = transport.import_grpc()
    with grpc.insecure_channel(address, options=transport.client_options()) as channel:
        call = channel.unary_unary(transport.RULES, RulesRequest.SerializeToString, RulesReply.FromString)
        try:
            return list(call(RulesRequest(), timeout=ANSWER_S).states)
        except grpc.RpcError as error:
            reason = cause(error.code().name, error.details() or "")
            raise click.ClickException(
                f"controller {address} cannot be reached: {reason}; check the address and that "
                "expanse-controller serve runs there"
            ) from None


def _is_of(key: str, wanted: str) -> bool:
    """Whether the job `key` is the one that is wanted, or one whose name is cut in `wanted`."""
    from expanse_ebpf.wire import keys
    from expanse_ebpf.wire.collector_pb2 import JobIdentity

    scheduler, _, name = key.partition("/")
    return keys.matches(JobIdentity(scheduler=scheduler, id=name), wanted)


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH
