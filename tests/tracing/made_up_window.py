"""A window's process that does what a test tells it to: `command(HOW)` is its command.

It speaks as expanse_ebpf.tracing.window does: settings in the last argument, frames on stdin and stdout.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import time
import zlib
from typing import Any

PART = 512 * 1024


def command(how: str) -> tuple[str, ...]:
    """What is run; see the functions at the end for what `how` may be."""
    return (sys.executable, "-EP", "-m", "tests.tracing.made_up_window", how)


class Window:
    """What a window's process knows."""

    def __init__(self, settings: Any) -> None:
        from expanse_ebpf.wire.collector_pb2 import Trace, TraceReply, TraceStatus

        self.settings = settings
        self.trace = Trace()
        self.reply = TraceReply
        self.status = TraceStatus()
        self.inbox = b""

    def say(self, state: int, reason: str = "", **fields: Any) -> None:
        """A status."""
        self.status.state, self.status.reason = state, reason
        for name, value in fields.items():
            setattr(self.status, name, value)
        self.write(self.reply(status=self.status))

    def part(self, index: int, parts: int, data: bytes) -> None:
        reply = self.reply()
        reply.part.index, reply.part.parts, reply.part.data = index, parts, data
        self.write(reply)

    def write(self, message: Any) -> None:
        body = message.SerializeToString()
        sys.stdout.buffer.write(struct.pack(">I", len(body)) + body)
        sys.stdout.buffer.flush()

    def listen(self, seconds: float) -> None:
        """Take what comes in for so long, or until there can be no more."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([0], [], [], left)[0]:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                self.inbox += data
                while len(self.inbox) >= 4 and len(self.inbox) >= 4 + (
                    n := int.from_bytes(self.inbox[:4], "big")
                ):
                    self.trace.MergeFromString(self.inbox[4 : 4 + n])
                    self.inbox = self.inbox[4 + n :]

    def send_trace(self, fill: bytes = b"") -> None:
        """The trace in parts; `fill` goes in as well, and cannot be made smaller."""
        self.trace.status.reason = self.settings.dumps()
        self.trace.functions.append(fill.hex())
        packed = zlib.compress(self.trace.SerializeToString(), 1)
        chunks = [packed[i : i + PART] for i in range(0, len(packed), PART)]
        for i, chunk in enumerate(chunks):
            self.part(i, len(chunks), chunk)


def main() -> None:
    from expanse_ebpf.tracing.settings import WindowSettings
    from expanse_ebpf.wire import collector_pb2 as pb

    how, settings = sys.argv[1], WindowSettings.loads(sys.argv[2])
    window = Window(settings)
    if how == "absent":
        print("no such module", file=sys.stderr)
        sys.exit(3)
    if how == "descriptors":
        names = sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        kept = [fd for fd in names if os.path.exists(f"/proc/self/fd/{fd}")]  # noqa: PTH110
        window.say(pb.TRACE_STATE_NO_TARGETS, f"{kept} {settings.slots_fd} {settings.totals_fd}")
        return
    if how == "no_targets":
        window.say(pb.TRACE_STATE_NO_TARGETS, "nobody is there")
        return
    if how == "length":
        sys.stdout.buffer.write(b"\xff\xff\xff\xff")
        sys.stdout.buffer.flush()
        time.sleep(60)
    if how == "bytes":
        sys.stdout.buffer.write(b"\0\0\0\x04\xff\xff\xff\xff")
        sys.stdout.buffer.flush()
        time.sleep(60)
    if how == "chatter":
        for number in range(300):
            print(f"line {number} \x1b[31m", file=sys.stderr)
        print("x" * 100_000, file=sys.stderr)
    wait_s = settings.start_ns / 1e9 - time.time()
    if wait_s > 0:
        window.say(pb.TRACE_STATE_WAITING, launches=0)
        window.listen(wait_s)
    if how == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        window.say(pb.TRACE_STATE_OPEN, f"child {child.pid}")
        time.sleep(1000)
    window.say(pb.TRACE_STATE_OPEN, from_ns=time.time_ns(), targets=2)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lies":
        window.say(99, "\x1b" + 3000 * "x", traced_share=float("nan"), cost_share=-1.0)
        return
    window.listen(settings.seconds)
    window.say(pb.TRACE_STATE_DONE, to_ns=time.time_ns(), launches=7, traced_share=1.0)
    if how == "half":
        window.part(0, 2, b"abc")
    elif how == "wrong":
        window.part(1, 2, b"abc")
        time.sleep(60)
    elif how.startswith("large"):
        window.send_trace(os.urandom(int(how.removeprefix("large")) << 20))
    elif how != "bare":
        window.send_trace()


if __name__ == "__main__":
    main()
