"""The command itself: help, errors, completion, and what it does not import."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest

from expanse_ebpf import __version__, cli
from expanse_ebpf.errors import ConfigError, ExpanseError, UnknownJobError

COMMAND = [sys.executable, "-c", "from expanse_ebpf.cli import main; main()"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Any], Any]:
    """The exit code and stderr of a subcommand that raises what is given."""

    def attempt(error: BaseException) -> tuple[int, str]:
        @click.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(cli.Commands, "get_command", lambda *_: command)
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["top"])
        assert isinstance(exit_info.value.code, int)
        return exit_info.value.code, capsys.readouterr().err

    return attempt


def test_help_names_every_command_and_has_examples() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name, (_, line) in cli.COMMANDS.items():
        assert f"  {name}" in result.stdout
        assert line in result.stdout
    assert "Examples:" in result.stdout
    assert run("-h").stdout == result.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = run(name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: expanse-ebpf {name}")


def test_version() -> None:
    assert run("--version").stdout == f"expanse-ebpf {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["topp"], "error: No such command 'topp'"),
        (["top", "--evry", "5"], "error: No such option '--evry'"),
        (["top", "--sort", "beauty"], "error: Invalid value for '--sort': 'beauty' is not one of"),
        (["top", "--every", "soon"], "error: Invalid value for '--every'"),
        (["--what"], "error: No such option '--what'"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], line: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert "--help" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ExpanseError("a cause; a remedy"), 1, "error: a cause; a remedy\n"),
        (ConfigError("bad\nline"), 2, "error: bad line\n"),
        (UnknownJobError("no job \x1b[2J"), 3, "error: no job \ufffd[2J\n"),
        (click.ClickException("broken"), 1, "error: broken\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
)
def test_exit_codes(failing: Callable[[Any], Any], error: BaseException, code: int, line: str) -> None:
    assert failing(error) == (code, line)


def test_other_faults_keep_their_traceback(failing: Callable[[Any], Any]) -> None:
    with pytest.raises(OSError, match="No space"):
        failing(OSError(errno.ENOSPC, "No space left on device"))


def test_a_reader_that_has_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run([*COMMAND, "--help"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (0, b"")


def test_ctrl_c_is_quiet() -> None:
    code = (
        "import click, os, signal\n"
        "from expanse_ebpf import cli\n"
        "command = click.command()(lambda: os.kill(os.getpid(), signal.SIGINT) or signal.pause())\n"
        "cli.Commands.get_command = lambda *_: command\n"
        "cli.main(['top'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGINT, "", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    result = run("completion", shell)
    assert result.returncode == 0
    assert "_EXPANSE_EBPF_COMPLETE" in result.stdout
    assert "expanse-ebpf" in result.stdout


def test_completion_knows_commands_and_options() -> None:
    words = {"_EXPANSE_EBPF_COMPLETE": "bash_complete"}
    names = run(COMP_WORDS="expanse-ebpf ", COMP_CWORD="1", **words).stdout
    assert {line.partition(",")[2] for line in names.splitlines()} >= {*cli.COMMANDS, "completion"}
    options = run(COMP_WORDS="expanse-ebpf top --", COMP_CWORD="2", **words).stdout
    assert "plain,--once" in options


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"textual", "grpc", "google.protobuf", "psutil"}),
        (["agent", "--help"], {"textual", "rich", "psutil", "pyroute2", "asyncio"}),
        (["profile", "--help"], {"textual", "rich", "grpc", "google.protobuf", "psutil"}),
        (["top", "--once", "--socket", "/nonexistent"], {"textual", "rich", "grpc", "asyncio"}),
    ],
)
def test_what_is_not_imported(arguments: list[str], absent: set[str]) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('MODULES', *sys.modules, file=sys.stderr))\n"
        "from expanse_ebpf.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    modules = set(result.stderr.partition("MODULES ")[2].split())
    assert "click" in modules
    assert not absent & modules
