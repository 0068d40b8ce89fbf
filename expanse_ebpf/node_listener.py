"""The place at which the node's socket is reached: its file, and who gets it when two agents start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from expanse_ebpf.errors import ConfigError, UnavailableError

_AT_A_TIME = 16  # connections that are taken; the rest at the next turn of the loop


class Listener:
    """A listening Unix socket at `path`, for everyone; `backlog` connections may wait there."""

    def __init__(self, path: str, backlog: int) -> None:
        self.path = path
        self._backlog = backlog
        self._socket: socket.socket | None = None
        self._inode = (0, 0)
        self._spare = -1  # a descriptor to be given up when there are no others

    @property
    def is_open(self) -> bool:
        """Whether it listens."""
        return self._socket is not None

    def fileno(self) -> int:
        """For a selector: readable when somebody waits."""
        return -1 if self._socket is None else self._socket.fileno()

    def open(self) -> None:
        """Start to listen.

        Raises ConfigError when the path cannot be a socket, UnavailableError when another agent
        answers there or the place cannot be written.
        """
        if len(os.fsencode(self.path)) > 107:  # sun_path, with its final NUL
            raise ConfigError(
                f"agent.socket: {self.path} is longer than 107 bytes, all that a socket's path can have"
            )
        directory = Path(self.path).parent
        try:
            if not directory.is_dir():
                directory.mkdir(parents=True)
                directory.chmod(0o755)  # whatever the umask: everyone may connect
            with _locked(self.path + ".lock"):
                self._remove_stale()
                self._listen()
        except OSError as error:
            raise UnavailableError(
                f"cannot open the node's socket {self.path}: {error.strerror}; "
                "run the agent as root or set agent.socket"
            ) from None

    def _remove_stale(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"agent.socket: {self.path} exists and is not a socket; remove it or set another"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(self.path)
        # EAGAIN is a full backlog: somebody listens, however slowly.
        if code in (0, errno.EAGAIN, errno.EINPROGRESS):
            raise UnavailableError(f"an agent already runs on {self.path}; stop it or set agent.socket")
        Path(self.path).unlink()

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(self.path)
            Path(self.path).chmod(0o666)  # who may see what is decided by credentials
            status = os.lstat(self.path)
            listener.listen(self._backlog)
        except OSError:
            listener.close()
            raise
        self._inode = (status.st_dev, status.st_ino)
        self._socket = listener
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> Iterator[socket.socket]:
        """Those who wait, each as a socket that does not block; no more than a few at a time."""
        for _ in range(_AT_A_TIME if self._socket is not None else 0):
            assert self._socket is not None
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse_one()
                return
            connection.setblocking(False)
            yield connection

    def _refuse_one(self) -> None:
        """Take one connection and close it when there are no descriptors left.

        It would stay in the backlog and keep the loop awake for ever.
        """
        assert self._socket is not None
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._socket.accept()[0].close()
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Remove the socket's file, unless it is another one's by now; safe to call twice."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        os.close(self._spare)
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._inode:
                Path(self.path).unlink()


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a lock file, removed in the end, so that of two agents that start at once one sees the other."""
    path = Path(name)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Its last holder may have removed it between our open and our lock.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                try:
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(descriptor)
