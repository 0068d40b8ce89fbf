"""The agent's stream of reports to the controller."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import expanse_ebpf
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import Downstream, Hello, NodeIdentity, Report, TraceRequest, Upstream
from expanse_ebpf.wire.failure import cause

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.5, 10.0, 1.6
# A controller that takes reports and stores none for so long is named in `state`.
STALLED_S = 15.0
# Commands that wait to be taken; one past them is not heard, and the controller says that no answer came.
MAX_COMMANDS = 32
# A command that is sent again, because the controller cannot know that it has arrived, is known by its id.
_REMEMBERED = 256
_WINDOW = re.compile(r"[0-9a-f]{16}")

_log = logging.getLogger(__name__)


class ControllerStream:
    """Keeps reports until the controller has stored them, and sends them in order over one stream.

    After a cut everything that is not acknowledged is sent again; the controller stores each report
    once. `address` is HOST:PORT, `max_unsent` the number of reports held: over it the oldest is
    dropped and counted. `ping_s` is the keepalive interval in seconds.

    What the controller asks for comes down the same stream: `commands_fd` is readable while there is
    something to take by `take_commands`.
    """

    def __init__(
        self,
        address: str,
        node: NodeIdentity,
        max_unsent: int = 3600,
        ping_s: float = transport.CLIENT_PING_S,
    ) -> None:
        self.address = address
        self._hello = Upstream(hello=Hello(node=node, version=expanse_ebpf.__version__)).SerializeToString()
        self._max_unsent = max_unsent
        self._ping_s = ping_s
        self._reports: deque[tuple[int, bytes]] = deque()  # (sequence, serialised Upstream), oldest first
        self._taken = 0  # reports that have left the deque's front, ever
        self._dropped = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._attempt = 0  # the stream's number; the writer of an older stream ends
        self._call: Any = None
        self._connected = False
        self._state = f"controller {address}: not connected yet"
        self._progress = time.monotonic()  # when a report was last acknowledged, or none was waiting
        self._thread: threading.Thread | None = None
        self._commands: deque[TraceRequest] = deque()
        self._commanded: deque[str] = deque(maxlen=_REMEMBERED)  # ids of windows
        self._commands_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._told = False  # of commands that nobody understands

    @property
    def commands_fd(self) -> int:
        """For a selector: readable while commands are waiting. Closed by `stop`."""
        return self._commands_fd

    def take_commands(self) -> list[TraceRequest]:
        """The windows that the controller wants opened, each once, in the order in which they came."""
        with self._changed:
            taken = list(self._commands)
            self._commands.clear()
            if taken and self._commands_fd >= 0:
                os.eventfd_read(self._commands_fd)
        return taken

    @property
    def unsent(self) -> int:
        """Reports that the controller has not acknowledged."""
        return len(self._reports)

    @property
    def dropped(self) -> int:
        """Reports lost since the start."""
        return self._dropped

    @property
    def connected(self) -> bool:
        """Whether the controller has answered on the stream that is open now."""
        return self._connected

    @property
    def state(self) -> str:
        """One line about the link."""
        stalled = time.monotonic() - self._progress
        if self._connected and self._reports and stalled > STALLED_S:
            return f"controller {self.address} has stored nothing for {stalled:.0f} s"
        return self._state

    def start(self) -> None:
        """Connect in the background; never fails, `state` says how it went."""
        self._thread = threading.Thread(target=self._run, name="controller-stream", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        """Take over `report`; returns at once, whatever the link does."""
        upstream = Upstream(report=report)
        upstream.report.ClearField("node")  # the Hello of the stream says it once
        message = upstream.SerializeToString()
        with self._changed:
            if len(message) > transport.MAX_MESSAGE_BYTES:
                self._dropped += 1
                return
            if not self._reports:
                self._progress = time.monotonic()
            self._reports.append((report.sequence, message))
            if len(self._reports) > self._max_unsent:
                self._reports.popleft()
                self._taken += 1
                self._dropped += 1
            self._changed.notify_all()

    def stop(self, timeout: float) -> None:
        """Give the controller up to `timeout` seconds to acknowledge what is left, then hang up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reports or not self._connected, timeout)
            self._stopping = True
            self._changed.notify_all()
            call = self._call
        if call is not None:
            call.cancel()
        if self._thread is not None:
            self._thread.join(5.0)
            self._thread = None
        with self._changed:
            if self._commands_fd >= 0:
                os.close(self._commands_fd)
                self._commands_fd = -1

    def _run(self) -> None:
        grpc = transport.import_grpc()
        transport.wait_without_polling(grpc)
        # One channel for all attempts: it remembers that a server wanted fewer pings.
        channel = grpc.insecure_channel(
            self.address, options=transport.client_options(self._ping_s), compression=grpc.Compression.Gzip
        )
        open_stream = channel.stream_stream(
            transport.STREAM, request_serializer=None, response_deserializer=Downstream.FromString
        )
        pause = FIRST_PAUSE_S
        try:
            while not self._stopping:
                acknowledged = self._stream(grpc, open_stream)
                pause = FIRST_PAUSE_S if acknowledged else min(pause * PAUSE_GROWTH, LONGEST_PAUSE_S)
                with self._changed:
                    # Jitter keeps a cluster's nodes from coming back all at once.
                    self._changed.wait_for(lambda: self._stopping, pause * random.uniform(0.6, 1.2))
        finally:
            channel.close()

    def _stream(self, grpc: Any, open_stream: Any) -> bool:
        """One stream, from the call to its end; whether anything was acknowledged on it."""
        acknowledged = False
        with self._changed:
            if self._stopping:
                return False
            self._attempt += 1
            self._call = call = open_stream(self._requests(self._attempt))
        try:
            call.initial_metadata()
            if call.is_active():  # a call that has failed has no metadata either
                with self._changed:
                    self._connected = True
                    self._progress = time.monotonic()
                    self._state = f"connected to controller {self.address}"
            for message in call:
                kind = message.WhichOneof("message")
                if kind == "acknowledgement":
                    self._acknowledge(message.acknowledgement.sequence)
                    acknowledged = True
                elif kind == "trace" and _WINDOW.fullmatch(message.trace.id):
                    self._take(message.trace)
                elif not self._told:
                    self._told = True
                    _log.warning(
                        "controller %s asks for something that this release does not know; it is left out",
                        self.address,
                    )
            reason = "it ended the stream"
        except grpc.RpcError as error:
            reason = cause(error.code().name, error.details() or "")
        except Exception as error:  # whatever gRPC does, the agent's reports must go on
            reason = f"{type(error).__name__}: {error}"
        was_connected = self._connected
        call.cancel()
        with self._changed:
            self._connected = False
            self._call = None
            self._attempt += 1
            verb = "is lost" if was_connected else "cannot be reached"
            self._state = f"controller {self.address} {verb}: {reason}"
            self._changed.notify_all()
        return acknowledged

    def _requests(self, attempt: int) -> Iterator[bytes]:
        """What goes up on one stream; gRPC takes the next message when the last has left."""
        yield self._hello
        position = 0  # of the next report, counted as `_taken` counts
        while True:
            with self._changed:
                position = max(position, self._taken)
                while (
                    self._attempt == attempt
                    and not self._stopping
                    and position >= self._taken + len(self._reports)
                ):
                    self._changed.wait()
                    position = max(position, self._taken)
                if self._attempt != attempt or self._stopping:
                    return
                message = self._reports[position - self._taken][1]
                position += 1
            yield message

    def _acknowledge(self, sequence: int) -> None:
        with self._changed:
            self._progress = time.monotonic()
            while self._reports and self._reports[0][0] <= sequence:
                self._reports.popleft()
                self._taken += 1
            self._changed.notify_all()

    def _take(self, command: TraceRequest) -> None:
        with self._changed:
            if command.id in self._commanded or self._commands_fd < 0:
                return
            if len(self._commands) >= MAX_COMMANDS:
                _log.warning(
                    "controller %s asks for more than %d windows at once; %s is not opened",
                    self.address,
                    MAX_COMMANDS,
                    command.id,
                )
                return
            self._commanded.append(command.id)
            self._commands.append(command)
            os.eventfd_write(self._commands_fd, 1)
