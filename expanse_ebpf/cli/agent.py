"""expanse-ebpf agent: watch this node until told to stop."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from expanse_ebpf.config import Config, load, split_address
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.wire.service_manager import ServiceManager

_LEAST_FILES = 256


@click.command("agent")
@click.option("--config", "file", type=click.Path(path_type=Path), help="Configuration file (TOML).")
@click.option("--interval", "interval_s", metavar="SECONDS", help="Time between reports.  [default: 1]")
@click.option("--socket", metavar="PATH", help="The node's Unix socket, for `top` and others.")
@click.option("--node-name", metavar="NAME", help="This node's name.  [default: NODE_NAME, else the host's]")
@click.option("--state-dir", metavar="DIR", help="Where the installation's id is kept.")
@click.option("--controller", "address", metavar="HOST:PORT", help="Where reports go.")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Serve Prometheus metrics there.")
@click.option("--counters", metavar="LIST", help="Hardware counters, e.g. cycles,instructions; '' for none.")
@click.option(
    "--hierarchy", metavar="NAME", help="Cgroup hierarchy that tells jobs apart.  [default: by looking]"
)
@click.option("--ticks", type=click.IntRange(min=1), help="End after so many reports.")
@click.option("--standalone", is_flag=True, help="Run a controller beside the agent, on this node alone.")
@click.option("--db", type=click.Path(path_type=Path), help="The standalone controller's store.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where the standalone controller listens.  [default: any free port of 127.0.0.1; see the log]",
)
def command(
    file: Path | None,
    ticks: int | None,
    standalone: bool,
    db: Path | None,
    listen: str | None,
    **flags: str | None,
) -> None:
    """Watch every job on this node until SIGTERM or Ctrl-C.

    What this node cannot do is said once and left out; `expanse-ebpf check` tells it beforehand. Every
    setting can also stand in the configuration file or in the environment (EXPANSE_AGENT_INTERVAL_S=5).

    With --standalone the log says where to point --controller of top and profile: "controller on
    127.0.0.1:41234". --listen 127.0.0.1:9777 takes the same port each time.

    \b
    Examples:
      expanse-ebpf agent
      expanse-ebpf agent --controller controller.example:9777 --interval 5
      expanse-ebpf agent --standalone --db /var/lib/expanse-controller/reports.db
    """
    service = ServiceManager()
    if sys.stderr is not None:
        faulthandler.enable()  # so that the watchdog's SIGABRT tells where the agent was stuck
    logging.basicConfig(format="expanse-ebpf: %(message)s", level=logging.INFO, stream=sys.stderr)
    if not standalone and (db or listen):
        raise click.UsageError("--db and --listen go with --standalone")
    if listen:
        split_address(listen, "--listen")
    if standalone and flags["address"]:
        raise click.UsageError("--standalone brings its own controller; leave --controller out")
    tables = {"address": "controller", "counters": "cpu", "hierarchy": "cpu"}
    overrides: dict[str, Any] = {
        f"{tables.get(name, 'agent')}.{name}": value for name, value in flags.items()
    }
    config = load(file, overrides=overrides)
    _raise_descriptor_limit()
    with _controller(config, db, listen) if standalone else _as_it_is(config) as ready:
        from expanse_ebpf.agent import Agent

        agent = Agent(ready, service)
        try:
            agent.start()
            agent.run(ticks)
        finally:
            agent.stop()


def _raise_descriptor_limit() -> None:
    """Counters take a descriptor per event and CPU, and cgroup files stay open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < _LEAST_FILES:
        raise UnavailableError(
            f"only {hard} files may be open, {_LEAST_FILES} are the least that the agent can work with: "
            "raise the hard limit (ulimit -Hn, LimitNOFILE)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _as_it_is(config: Config) -> Iterator[Config]:
    yield config


@contextmanager
def _controller(config: Config, db: Path | None, listen: str | None) -> Iterator[Config]:
    """A controller as a child, and the configuration with its address.

    It is started before this process has any thread or channel, and ends with it, however that ends.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "expanse_controller", "serve", "--listen", listen or "127.0.0.1:0"]
    command += ["--announce", str(writer), "--parent-death", *(["--db", str(db)] if db else [])]
    with subprocess.Popen(command, pass_fds=(writer,), stdout=subprocess.DEVNULL) as child:
        os.close(writer)
        try:
            with open(reader, encoding="utf-8") as announcement:
                line = announcement.readline()  # ends when the child does
            if not line:
                raise UnavailableError("the controller did not start; its own message is above")
            address = json.loads(line)["listen"]
            logging.getLogger(__name__).info("controller on %s", address)
            yield replace(config, controller=replace(config.controller, address=address))
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
