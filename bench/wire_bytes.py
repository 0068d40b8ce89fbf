"""What shipping and storing cost: bytes on the wire, bytes on the disk, memory and CPU.

Real agents' streams and a real controller on the loopback interface; the bytes are counted by a relay
between the two. Usage: python -m bench.wire_bytes [--seconds 40] [--nodes 10] [--jobs 1]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench import reports
from expanse_ebpf.ship.client import ControllerStream

KIB, MIB = 1024, 1024 * 1024
# One TCP segment with IPv4 and time stamps in an Ethernet frame: what a write costs on the cable beside
# its bytes. Acknowledgements without data are not counted.
FRAME_BYTES = 66


class Relay:
    """Passes one connection on and counts what goes through, by direction."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.sent = self.sent_writes = self.received = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()
        self._pump(client, server, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_up:
                    self.sent += len(data)
                    self.sent_writes += 1
                else:
                    self.received += len(data)
                sink.sendall(data)


def process_figures(pid: int) -> tuple[int, int, float]:
    """PSS in bytes, bytes written to the disk, and CPU seconds of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    pss = int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) * KIB
    written = int(Path(f"/proc/{pid}/io").read_text().split("write_bytes:")[1].split()[0])
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return pss, written, (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def show(what: str, figure: str, target: str) -> None:
    print(f"{what:<58} {figure:>14}   target {target}", flush=True)


def sender_main(address: str, seconds: float, jobs: int) -> None:
    """The body of a bare agent: a stream and a report per second; prints its own cost."""
    node = reports.node(999)
    bare = process_figures(os.getpid())[0]
    stream = ControllerStream(address, node)
    stream.start()
    cpu_s, made = 0.0, 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        made += 1
        report = reports.report(node, made, made, jobs)
        time.sleep(1.0)
        if made == 2:
            begin = process_figures(os.getpid())[2]
        stream.send(report)
    pss, _, end = process_figures(os.getpid())
    building = time.process_time()
    for tick in range(20):
        reports.report(node, 1, tick, jobs)
    building = (time.process_time() - building) / 20
    cpu_s = (end - begin) / (made - 2) - building
    stream.stop(2.0)
    print(json.dumps({"bare": bare, "pss": pss, "cpu_s": cpu_s, "unsent": stream.unsent}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="jobs per node")
    parser.add_argument("--directory", help="where the store is put; a real disk, not a tmpfs")
    parser.add_argument("--sender", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sender:
        sender_main(options.sender, options.seconds, options.jobs)
        return
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd()) as directory:
        serve = f"{sys.executable} -m expanse_controller serve --listen 127.0.0.1:0 --parent-death --db"
        controller = subprocess.Popen(
            [*serve.split(), f"{directory}/reports.db"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert controller.stdout is not None
            line = controller.stdout.readline()
            host, port = line.split("listening on ")[1].split(",")[0].rsplit(":", 1)
            measure(controller.pid, (host, int(port)), options)
        finally:
            controller.send_signal(signal.SIGTERM)
            controller.wait(10)


def measure(controller: int, target: tuple[str, int], options: argparse.Namespace) -> None:
    address = f"{target[0]}:{target[1]}"
    sender = subprocess.Popen(
        f"{sys.executable} -m bench.wire_bytes --sender {address} --seconds {options.seconds} "
        f"--jobs {options.jobs}".split(),
        stdout=subprocess.PIPE,
        text=True,
    )
    nodes = [reports.node(n) for n in range(1, options.nodes)]  # the sender is one more
    relay = Relay(target)
    streams = [ControllerStream(address if n else relay.address, node) for n, node in enumerate(nodes)]
    for stream in streams:
        stream.start()
    warm_up, tick = 5, 0
    begin = process_figures(controller)
    sent = writes = received = 0
    started = time.monotonic()
    while time.monotonic() - started < options.seconds:
        tick += 1
        if tick == warm_up:
            begin, since = process_figures(controller), time.monotonic()
            sent, writes, received = relay.sent, relay.sent_writes, relay.received
        due = started + tick
        for n, (stream, node) in enumerate(zip(streams, nodes, strict=True)):
            # Nodes tick at any time within the second, each at its own.
            time.sleep(max(0.0, due + n / len(nodes) - time.monotonic()))
            stream.send(reports.report(node, tick, tick, options.jobs))
    elapsed = time.monotonic() - since
    pss, written, cpu = process_figures(controller)
    sent, writes, received = relay.sent - sent, relay.sent_writes - writes, relay.received - received
    output, _ = sender.communicate(timeout=30)
    bare = json.loads(output)
    for stream in streams:
        stream.stop(2.0)
    size = reports.report(nodes[0], tick, tick, options.jobs).ByteSize()
    jobs = f"{options.jobs} job{'s' if options.jobs > 1 else ''}"
    show(f"one report with {jobs}, serialised", f"{size} B", "-")
    show("sent by a node (stream)", f"{sent / elapsed / KIB:.2f} KiB/s", "1 KiB/s")
    show(
        "sent by a node (with frame headers)",
        f"{(sent + FRAME_BYTES * writes) / elapsed / KIB:.2f} KiB/s",
        "1 KiB/s",
    )
    show("received by a node (stream)", f"{received / elapsed / KIB:.2f} KiB/s", "-")
    show(
        f"controller, {options.nodes} nodes: written to disk, per node",
        f"{(written - begin[1]) / elapsed / options.nodes / KIB:.2f} KiB/s",
        "8 KiB/s",
    )
    show(f"controller, {options.nodes} nodes: PSS", f"{pss / MIB:.1f} MiB", "60 MiB")
    show(f"controller, {options.nodes} nodes: CPU", f"{(cpu - begin[2]) / elapsed:.4f} cores", "0.01 cores")
    show("a node's stream: PSS above the bare process", f"{(bare['pss'] - bare['bare']) / MIB:.1f} MiB", "-")
    show("a node's stream: CPU per report", f"{bare['cpu_s'] * 1e3:.2f} ms", "-")
    show("reports not stored at the end", str(bare["unsent"] + sum(s.unsent for s in streams)), "0")


if __name__ == "__main__":
    main()
