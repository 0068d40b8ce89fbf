"""The `expanse-ebpf` command: one module per subcommand, imported when it is called."""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from expanse_ebpf import __version__
from expanse_ebpf.errors import ExpanseError

PROGRAM = "expanse-ebpf"
INTERRUPTED = 130  # as a shell has it for SIGINT

# Name to (module, line of help). The agent must not pay for the terminal library, nor `top` for grpc.
COMMANDS = {
    "agent": ("expanse_ebpf.cli.agent", "Watch every job on this node."),
    "run": ("expanse_ebpf.cli.run", "Start a command as a job of its own."),
    "top": ("expanse_ebpf.cli.top", "Show the jobs of this node, live."),
    "profile": ("expanse_ebpf.cli.profile", "Show which Python lines a job's time goes to."),
    "trace": ("expanse_ebpf.cli.trace", "Trace every GPU call of a job for some seconds."),
    "traces": ("expanse_ebpf.cli.traces", "List and fetch the traces that a controller has."),
    "check": ("expanse_ebpf.cli.check", "Say what this node can and cannot do, and why."),
    "bench": ("expanse_ebpf.cli.bench", "Measure what watching costs on this machine."),
    "demo": ("expanse_ebpf.cli.demo", "Agent, controller and a small training job, all at once."),
}


class Commands(click.Group):
    """A group that imports a subcommand when it is called, and prints errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which they are met."""
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help, without importing a thing."""
        rows = [(name, line) for name, (_, line) in COMMANDS.items()]
        rows += [(name, command.get_short_help_str()) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments, which for --help and --version is all there is to do."""
        with _ends():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand."""
        with _ends():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and exit; errors go to stderr as one line."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        sys.exit(_exit_code(lambda: super(Commands, self).main(args, PROGRAM, complete_var, False, **extra)))


def _exit_code(call: Callable[[], Any]) -> int:
    try:
        code = call()
        _flush()
    except ExpanseError as error:
        _complain(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else PROGRAM
        message = error.format_message().rstrip(".")
        _complain(f"{message}{' See' if message.endswith('?') else '; see'} {path} --help")
        return error.exit_code
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _flush() -> None:
    if sys.stdout is not None:
        with _ends():
            sys.stdout.flush()


@contextmanager
def _ends() -> Iterator[None]:
    """Two ways to end that are no errors: Ctrl-C, and a reader of the output who has enough."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        output = select.poll()
        output.register(1, 0)
        if not any(events & select.POLLERR for _, events in output.poll(0)):
            raise  # it was another pipe
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise click.exceptions.Exit(0) from None


def _complain(message: str) -> None:
    from expanse_ebpf.top.text import clean

    line = f"error: {clean(' '.join(message.split()))}\n"
    if sys.stderr is not None:
        encoding = sys.stderr.encoding or "ascii"
        sys.stderr.write(line.encode(encoding, "replace").decode(encoding))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  expanse-ebpf check                         what can this node do?
  expanse-ebpf agent                         watch it (as root)
  expanse-ebpf top                           and look
  expanse-ebpf run --name train -- python train.py
  expanse-ebpf top --once --json --job run/train
  expanse-ebpf profile --job run/train -o train.html
  expanse-ebpf trace run/train -o train.pftrace""",
)
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
def main() -> None:
    """Watch every job on a GPU cluster's node, cheaply."""


@main.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Examples:
    bash:  eval "$(expanse-ebpf completion bash)"
    zsh:   eval "$(expanse-ebpf completion zsh)"
    fish:  expanse-ebpf completion fish | source
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # Choice allows no other
    click.echo(kind(main, {}, PROGRAM, "_EXPANSE_EBPF_COMPLETE").source())
