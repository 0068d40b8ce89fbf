"""Tries, inside the sandbox of a unit, what it should and should not allow; prints {attempt: result} as JSON.

A result is "ok" or the name of the error.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

STATE = Path(os.environ["STATE_DIRECTORY"])
CGROUP = Path("/sys/fs/cgroup/expanse-run-probe")
NEWNS, NEWNET = 0x20000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """A function of the C library; raises OSError."""
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) == -1 and ctypes.get_errno():
        raise OSError(ctypes.get_errno(), name)


def device(path: str, flags: int) -> Callable[[], None]:
    return lambda: os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))


def write(path: str) -> Callable[[], object]:
    """Opens it for writing, and removes it if that made it."""

    def attempt() -> None:
        there = Path(path).exists()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        if not there:
            Path(path).unlink()

    return attempt


def cgroup() -> None:
    CGROUP.mkdir()
    CGROUP.rmdir()


def suid() -> None:
    file = STATE / "suid"
    file.touch()
    file.chmod(0o4755)


def give_away() -> None:
    (STATE / "given").touch()
    os.chown(STATE / "given", 1000, -1)


def executable_memory() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


ATTEMPTS: dict[str, Callable[[], object]] = {
    "write to its state": write(str(STATE / "file")),
    "write to /etc": write("/etc/probe"),
    "write to /run": write("/run/elsewhere"),
    "write to /usr": write("/usr/probe"),
    "write to another's state": write("/var/lib/expanse-ebpf/probe"),
    "write to the disk's root": write("/probe"),
    "see a file in /root": lambda: Path("/root/secret").stat(),
    "set a sysctl": write("/proc/sys/kernel/panic"),
    "make a cgroup": cgroup,
    "open /dev/null": device("/dev/null", os.O_RDWR),
    "open the disk": device("/dev/vda", os.O_RDONLY),
    "open the kernel's log": device("/dev/kmsg", os.O_RDONLY),
    "open a terminal": device(sys.argv[1], os.O_RDWR),
    "open the GPUs' control device": device("/dev/nvidiactl", os.O_RDWR),
    "make a device file": lambda: os.mknod("/dev/nvidia0", 0o20666, os.makedev(195, 0)),
    "mount": lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "leave the mount namespace": lambda: call("unshare", NEWNS),
    "leave the network namespace": lambda: call("unshare", NEWNET),
    # Of a process that is not traced; allowed, it would be ESRCH.
    "trace a process": lambda: call("ptrace", 2, 1, 0, 0),
    # Of no bytes, which would be ok.
    "write to a process's memory": lambda: call("process_vm_writev", os.getpid(), None, 0, None, 0, 0),
    "become another user": lambda: os.setuid(1000),
    "signal another user's process": lambda: os.kill(int(sys.argv[2]), signal.SIGCONT),
    "set the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
    "set the host's name": lambda: socket.sethostname("probe"),
    "become a real-time task": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "make a set-user-id file": suid,
    "give a file away": give_away,
    "make memory writable and executable": executable_memory,
    "load a module": lambda: call("delete_module", b"probe", 0),
    "open a packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
    "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
    "open an internet socket": lambda: socket.socket().close(),
}

results = {}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        results[name] = "ok"
    except OSError as error:
        results[name] = errno.errorcode.get(error.errno or 0, str(error.errno))
print(json.dumps(results))
