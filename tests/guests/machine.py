"""Boots a guest under qemu, runs one command in it and brings back what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.guests import image

# Whatever a test is about, a kernel that says one of these has been mistreated.
# Stalls are not among them: a guest that gets no CPU from its host has some.
COMPLAINT = re.compile(
    r"^.*(?:cut here|WARNING: |BUG: |Oops|Internal error: |general protection fault|invalid opcode|UBSAN: "
    r"|INFO: task .* blocked).*$",
    re.MULTILINE,
)
_OUTPUT_MIB = 64  # room for the files that come back
_POLL_S = 0.05


class GuestError(Exception):
    """The guest did not come to the end of its command; the message has what it said last."""


class Result(NamedTuple):
    """What came of the command."""

    exit_code: int
    output: str  # what it wrote to standard output and standard error
    files: Path  # the folder with what it left in /out
    kernel_log: str

    def check(self) -> Result:
        """Itself; raises GuestError when the command failed."""
        if self.exit_code:
            raise GuestError(f"exit code {self.exit_code}\n{self.output[-8000:]}")
        return self


_CONSOLE = {"amd64": "ttyS0", "arm64": "ttyAMA0"}
_INIT = {"none": "/payload/run", "systemd": "/usr/lib/systemd/systemd"}
_SYSTEMD = {
    "v2": "systemd.unified_cgroup_hierarchy=1",
    "v1": "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1",
    "hybrid": "systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=0",
}


def _model(architecture: str, accelerator: str, icount: bool) -> list[str]:
    """qemu's program and options for the kind of machine."""
    if architecture == "arm64":
        program, machine, cpu = "qemu-system-aarch64", "virt,gic-version=3", "max,pauth-impdef=on"
    else:
        program, machine, cpu = "qemu-system-x86_64", "q35", "host" if accelerator == "kvm" else "max"
    found = shutil.which(program)
    if found is None:
        raise GuestError(f"{program} is not installed")
    if architecture == "amd64" and accelerator == "tcg":
        # x86 kernels patch their own code while other CPUs run it (static keys). An emulator with a thread
        # for each CPU sometimes gets that wrong, and the guest dies of a breakpoint that is no longer there.
        accelerator = "tcg,thread=single"
    options = [found, "-machine", machine, "-cpu", cpu, "-accel", accelerator]
    # An idle guest's clock goes straight to the next timer, so that it depends on nothing of the host.
    return options + (["-icount", "shift=0,sleep=off"] if icount else [])


def _quoted(path: Path) -> str:
    """For an option of qemu's, where a comma ends the value."""
    return str(path).replace(",", ",,")


class Guest:
    """A running guest. Use as a context manager: qemu is gone when the block is left."""

    def __init__(
        self,
        kernel: image.Kernel,
        root: Path,
        payload: Path,
        folder: Path,
        *,
        arch: str,
        cgroup: str = "v2",
        init: str = "none",
        cpus: int = 2,
        memory_mib: int = 1024,
        icount: bool = False,
        accelerator: str = "tcg",
        parameters: str = "",
        limit_s: float = 300,
    ) -> None:
        """`folder` is the guest's own and empty; `parameters` are added to the kernel's command line."""
        self._folder = folder
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._console, self._output, self._disk = folder / "console", folder / "output", folder / "out.disk"
        with open(self._disk, "wb") as disk:
            disk.truncate(_OUTPUT_MIB << 20)
        self._output.touch()
        # An emulator that is short of CPU may not deliver ticks in the time that x86 waits for them at boot.
        line = (
            f"console={_CONSOLE[arch]} rdinit=/init guest.init={_INIT[init]} guest.cgroup={cgroup} "
            f"panic=-1 loglevel=4 no_timer_check {_SYSTEMD[cgroup] if init == 'systemd' else ''} {parameters}"
        )
        command = [
            # The kernel ends qemu when this process ends, however that comes about.
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *_model(arch, accelerator, icount),
            *("-smp", str(cpus), "-m", str(memory_mib)),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"),
            *("-kernel", str(kernel.image), "-initrd", str(kernel.initramfs), "-append", line),
            *("-chardev", "file,id=console,path=console", "-serial", "chardev:console"),
            *("-drive", f"if=virtio,format=raw,snapshot=on,file={_quoted(root)}"),
            *("-drive", f"if=virtio,format=raw,readonly=on,file={_quoted(payload)}"),
            *("-drive", f"if=virtio,format=raw,file={self._disk.name}"),
            *("-device", "virtio-serial", "-chardev", "file,id=output,path=output"),
            *("-device", "virtserialport,chardev=output"),
            *("-qmp", "unix:qmp,server=on,wait=off"),
        ]
        with open(folder / "qemu.log", "wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"TMPDIR": str(folder)},
            )

    def output(self) -> str:
        """What the command has written so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Until the command has written `text`; raises GuestError at the time limit or at the end."""
        while text not in self.output():
            if self._process.poll() is not None:
                raise self._error(f"it ended before it wrote {text!r}")
            self._check_time()
            time.sleep(_POLL_S)

    def pause(self, seconds: float) -> None:
        """Stop the whole machine, clock and all, and let it go on."""
        with self._monitor() as ask:
            ask("stop")
            time.sleep(seconds)
            ask("cont")

    @contextlib.contextmanager
    def _monitor(self) -> Any:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(30)
            folder = os.open(self._folder, os.O_PATH)  # a socket's path may be no longer than 107 bytes
            try:
                link.connect(f"/proc/self/fd/{folder}/qmp")
            finally:
                os.close(folder)
            stream = link.makefile("rw")

            def ask(command: str) -> Any:
                stream.write(json.dumps({"execute": command}) + "\n")
                stream.flush()
                while "return" not in (answer := json.loads(stream.readline())):  # events come in between
                    if "error" in answer:
                        raise GuestError(f"qemu on {command}: {answer['error']['desc']}")
                return answer["return"]

            stream.readline()  # the greeting
            ask("qmp_capabilities")
            yield ask

    def finish(self) -> Result:
        """Wait for the end; raises GuestError when there is none within the limit."""
        while self._process.poll() is None:
            self._check_time()
            time.sleep(_POLL_S)
        files = self._folder / "files"
        try:
            with tarfile.open(self._disk) as archive:
                archive.extractall(files, filter="data")
            code = int((files / ".exit").read_text())
            log = self._text(files / ".dmesg")
            for name in (".exit", ".dmesg"):
                (files / name).unlink()
        except (tarfile.TarError, OSError, ValueError) as error:
            raise self._error(f"it ended without a result ({error})") from error
        complaint = COMPLAINT.search(log)
        if complaint:
            raise self._error(f"the kernel complains:\n{log[complaint.start() :][:4000]}")
        return Result(code, self.output(), files, log)

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            self.close()
            raise self._error(f"not done within {self._limit_s:.0f} s")

    def _error(self, what: str) -> GuestError:
        parts = {"output": self.output(), "console": self._text(self._console)}
        parts["qemu"] = self._text(self._folder / "qemu.log")
        said = "".join(f"\n--- {name}\n{text[-3000:]}" for name, text in parts.items() if text.strip())
        return GuestError(f"guest: {what}{said}")

    @staticmethod
    def _text(path: Path) -> str:
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End qemu; safe to call twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
