"""`expanse-ebpf bench send`: results for others, when their owner says so."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from expanse_ebpf import config
from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.text import size

_KEPT = "to-send.json"


@click.command(
    "send",
    short_help="Show results without names, ask, and send them.",
    epilog="""\b
Examples:
  expanse-ebpf bench send cost --url https://example.org/in                   shows, asks, sends
  expanse-ebpf bench send cost --output cost.json                             keeps a file, sends nothing;
  expanse-ebpf bench send --file cost.json --url https://example.org/in       for later, or from elsewhere""",
)
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--file", type=click.Path(path_type=Path), help="Send a file that was kept, instead of DIR's results."
)
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="Keep a new file; send nothing."
)
@click.option("--url", help="Where to send it.  [default: send_url of the table bench in the configuration]")
@click.option("--yes", is_flag=True, help="Agree beforehand, where there is no terminal to ask on.")
@click.option("--config", "settings", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.pass_context
def command(
    ctx: click.Context,
    folder: Path | None,
    file: Path | None,
    output: Path | None,
    url: str | None,
    yes: bool,
    settings: Path | None,
) -> None:
    """Send the results in DIR, without names, paths and addresses, to a URL.

    Prints what is sent to standard output, byte for byte, and asks before anything leaves the machine;
    docs/benchmark-sending.md lists it. Exit code 0 when it was sent or kept, 1 when not, 2 for a wrong
    argument or file or without a URL, 130 after Ctrl-C. What did not arrive is kept in DIR/to-send.json.
    """
    if (folder is None) == (file is None):
        raise ConfigError("give either DIR, a bench's results, or --file FILE, what was kept of them")
    if output is not None and (file is not None or url is not None or yes):
        raise ConfigError("--output keeps a file of DIR's results and sends nothing; give it alone with DIR")
    body = _of_file(file) if file is not None else _of_results(folder)  # type: ignore[arg-type]
    if output is not None:
        _write(output, body, new=True)
        click.echo(
            f"{output}: {size(len(body))}, not sent; look through it, then: bench send --file {output}"
        )
        return
    if url is not None:
        config.check_url(url, "--url")
    else:
        url = config.load(settings).bench.send_url
    click.echo(body.decode("ascii"), nl=False)
    sys.stdout.flush()
    if not url:
        raise ConfigError(
            "there is no URL to send this to: give --url, or set send_url in the table bench of the "
            "configuration (EXPANSE_BENCH_SEND_URL); or keep it with --output FILE"
        )
    if not _agreed(len(body), url, yes=yes):
        click.echo("nothing was sent", err=True)
        ctx.exit(1)
    _send(url, body, keep=folder / _KEPT if folder is not None else None)


def _of_results(folder: Path) -> bytes:
    from expanse_ebpf.bench import plan, sending
    from expanse_ebpf.bench.results import PLAN, Results

    results = Results.read(folder)
    return sending.document(results, plan.load(folder / PLAN) if (folder / PLAN).exists() else None)


def _of_file(file: Path) -> bytes:
    from expanse_ebpf.bench import sending

    try:
        with open(file, "rb") as opened:
            return sending.checked(opened.read(sending.MOST_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not what `bench send --output` keeps: {error}") from None


def _agreed(length: int, url: str, *, yes: bool) -> bool:
    parts = urlsplit(url)
    open_to_all = parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1")
    note = ", which is not encrypted on its way" if open_to_all else ""
    click.echo(f"these {length} bytes would be sent to {url}{note}", err=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("nothing was sent: there is no terminal to ask on; agree with --yes")
    return click.confirm("send them?", default=False, err=True)


def _send(url: str, body: bytes, *, keep: Path | None) -> None:
    from expanse_ebpf.bench import sending

    try:
        status = sending.post(url, body)
    except KeyboardInterrupt:
        click.echo("ended while sending: it may have arrived, or not", err=True)
        raise
    except sending.UnsentError as error:
        if keep is None:
            raise
        _write(keep, body, new=False)
        raise sending.UnsentError(f"{error}; kept, try again with: bench send --file {keep}") from None
    click.echo(f"sent: HTTP status {status}", err=True)


def _write(path: Path, body: bytes, *, new: bool) -> None:
    try:
        with open(path, "xb" if new else "wb") as file:
            file.write(body)
    except FileExistsError:
        raise ConfigError(f"--output {path}: is there already; name another file") from None
    except OSError as error:
        raise UnavailableError(f"cannot keep {path}: {error.strerror}; name another with --output") from None
