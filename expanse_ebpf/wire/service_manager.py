"""What systemd is told about this process: sd_notify(3), one datagram for each message."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import MutableMapping

from expanse_ebpf.text import clean


class ServiceManager:
    """The service manager that started this process; where there is none, nothing is sent.

    The variables that name it leave `environment`, so that no child can speak for this process. A message
    that cannot be sent at once is not waited for: the job of the sender is another one. `listens` says
    whether there is one.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = os.fsencode(environment.pop("NOTIFY_SOCKET", ""))
        self._address = b"\0" + address[1:] if address.startswith(b"@") else address
        self.listens = bool(address)
        self._ready = False
        self._status = ""
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        meant = environment.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        number = watchdog_us.isascii() and watchdog_us.isdigit() and len(watchdog_us) < 20
        wanted = meant and number and int(watchdog_us) > 0
        # A third of what is allowed, so that one sign may be lost.
        self._sign_every_s = int(watchdog_us) / 3e6 if wanted else math.inf
        self._sign_due = -math.inf if wanted else math.inf

    def ready(self) -> None:
        """The service is up; said once."""
        if not self._ready:
            self._ready = self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; said when it is another one than before."""
        line = clean(" ".join(text.split()))  # a line break would begin another variable
        if line != self._status and self._send(f"STATUS={line}"):
            self._status = line

    def alive(self) -> float:
        """Give the watchdog a sign of life if one is due; seconds until the next, infinite without one."""
        now = time.monotonic()
        if now >= self._sign_due:
            self._send("WATCHDOG=1")
            self._sign_due = now + self._sign_every_s
        return self._sign_due - now

    def stopping(self) -> None:
        """The service is about to end."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> bool:
        if not self.listens:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(message.encode(), socket.MSG_DONTWAIT, self._address)
        except OSError:
            return False
        return True
