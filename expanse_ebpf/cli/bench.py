"""`expanse-ebpf bench`: what watching costs, measured on the machine that pays for it."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from expanse_ebpf.errors import ConfigError, ExpanseError, UnavailableError
from expanse_ebpf.text import clean

if TYPE_CHECKING:
    from rich.progress import Progress

    from expanse_ebpf.bench.results import Results


class FailedRunsError(ExpanseError):
    """Some comparison was given up; the report above has the others."""


class Steps(click.Group):
    """A group whose `send` is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which they are used."""
        return [*super().list_commands(ctx), "send"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        if cmd_name != "send":
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module("expanse_ebpf.cli.bench_send").command
        return command


@click.group(
    "bench",
    cls=Steps,
    short_help="Measure what watching costs on this machine.",
    epilog="""\b
Examples:
  expanse-ebpf bench run cpu.toml              an hour or so; see docs/benchmark.md
  expanse-ebpf bench report expanse-bench-cpu-20261201-103000 --html cost.html""",
)
def command() -> None:
    """Run a job again and again, beside the collector and beside nothing, and say how much longer it took."""


@command.command(
    "run",
    short_help="Run the comparisons of a plan.",
    epilog="""\b
Examples:
  expanse-ebpf bench run cpu.toml                      into a new folder in the current one
  expanse-ebpf bench run cpu.toml -o cost              Ctrl-C keeps what is done …
  expanse-ebpf bench run cpu.toml -o cost --resume     … and this goes on
  expanse-ebpf bench run cpu.toml --max-pairs 20 --json""",
)
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="DIR", help="Where the results go.")
@click.option("--resume", is_flag=True, help="Go on with the bench in DIR.")
@click.option("--max-pairs", type=click.IntRange(2, 10_000), help="No more pairs of runs than these.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of the order of runs.  [default: drawn]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def run(
    plan: Path, output: Path | None, resume: bool, max_pairs: int | None, seed: int | None, as_json: bool
) -> None:
    """Run the comparisons of PLAN, a TOML file, until each is known well enough.

    Needs root. Nothing else should run on the machine, other collectors least of all. The exit code is 0,
    or 1 when a comparison had to be given up, or 130 when it was ended before; the report comes in any case.
    """
    from expanse_ebpf.bench import report
    from expanse_ebpf.bench.session import opened

    if resume and output is None:
        raise ConfigError("--resume needs -o DIR, where the bench is")
    folder = output or Path(f"expanse-bench-{plan.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    # A service manager's way to end it, and a terminal's that goes away, are no other than Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    progress = Bar() if sys.stderr.isatty() else Lines()
    with opened(plan, folder, resume=resume, seed=seed, max_pairs=max_pairs, progress=progress) as bench:
        progress.says(f"results go to {folder}")
        try:
            bench.go()
        except KeyboardInterrupt:
            progress.close()
            _print(bench.results, as_json=as_json, markdown=False)
            click.echo(f"ended early; go on with: bench run {plan} -o {folder} --resume", err=True)
            raise
        finally:
            progress.close()
    _print(bench.results, as_json=as_json, markdown=False)
    given_up = report.given_up(bench.results)
    if given_up:
        raise FailedRunsError(f"given up: {'; '.join(given_up)}")


@command.command(
    "report",
    short_help="Show what was measured.",
    epilog="""\b
Examples:
  expanse-ebpf bench report cost
  expanse-ebpf bench report cost --html cost.html      one page with plots, for a browser
  expanse-ebpf bench report cost --json""",
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print the tables in Markdown.")
def report(folder: Path, html: Path | None, as_json: bool, markdown: bool) -> None:
    """Make tables, and a page with plots, of the results in DIR. Needs nothing else, and no root."""
    from expanse_ebpf.bench.results import Results

    if as_json and markdown:
        raise ConfigError("--json and --markdown are two forms of the same; give one")
    results = Results.read(folder)
    if html is not None:
        from expanse_ebpf.bench import page

        try:
            html.write_text(page.html(results), encoding="utf-8")
        except OSError as error:
            raise UnavailableError(f"{html}: {error.strerror}") from None
    _print(results, as_json=as_json, markdown=markdown)


def _print(results: Results, *, as_json: bool, markdown: bool) -> None:
    from expanse_ebpf.bench import report

    made = report.as_json if as_json else report.markdown if markdown else report.text
    click.echo(made(results))


class Lines:
    """A line for each run, where there is no terminal."""

    def begins(self, text: str, least_s: float | None, most_s: float | None, share: float) -> None:
        """A run begins."""
        click.echo(f"{share:4.0%}  {clean(text)}{_left(least_s, most_s)}", err=True)

    def says(self, text: str) -> None:
        """Something to keep."""
        click.echo(clean(text, 1000), err=True)

    def close(self) -> None:
        """Nothing stays open."""


class Bar:
    """A bar on a terminal. It is drawn between runs only: while one is measured, this process rests."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._progress: Progress = Progress(
            *(BarColumn(24), TaskProgressColumn(), TextColumn("{task.description}", markup=False)),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=1.0)
        self._progress.start()

    def begins(self, text: str, least_s: float | None, most_s: float | None, share: float) -> None:
        """A run begins."""
        description = f"{clean(text)}{_left(least_s, most_s)}"
        self._progress.update(self._task, completed=share, description=description, refresh=True)

    def says(self, text: str) -> None:
        """Something to keep above the bar."""
        self._progress.console.print(clean(text, 1000), markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was; safe to call twice."""
        self._progress.stop()


def _left(least_s: float | None, most_s: float | None) -> str:
    if least_s is None or most_s is None:
        return ""
    least, most = _duration(least_s), _duration(most_s)
    return f", {least} left" if least == most else f", {least} to {most} left"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return "under a minute"
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"
