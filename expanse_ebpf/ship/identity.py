"""Which node this is."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from expanse_ebpf.config import AgentConfig
from expanse_ebpf.errors import ConfigError
from expanse_ebpf.wire.collector_pb2 import NodeIdentity

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_NAME = 253  # the longest DNS name, which a Kubernetes node name is

_log = logging.getLogger(__name__)


def node_identity(config: AgentConfig, environment: Mapping[str, str] | None = None) -> NodeIdentity:
    """Name, installation and boot of this node.

    The installation's id is made on first use in `config.state_dir`. Where that cannot be written, the
    id is made from the boot's id, holds until the next boot, and a warning is logged. Raises
    ConfigError when the name is not fit for one, or is not known.
    """
    environment = os.environ if environment is None else environment
    name = node_name(config.node_name, environment, os.uname().nodename)
    boot_id = BOOT_ID.read_text(encoding="ascii").strip()
    try:
        install_id = _install_id(Path(config.state_dir))
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s): the installation's id holds until the next boot only; "
            "set agent.state_dir to a directory that stays",
            config.state_dir,
            error.strerror or error,
        )
        install_id = str(uuid.uuid5(uuid.NAMESPACE_OID, boot_id))
    return NodeIdentity(name=name, install_id=install_id, boot_id=boot_id)


def node_name(configured: str, environment: Mapping[str, str], host_name: str) -> str:
    """The node's name: as configured, else NODE_NAME, else the host's; raises ConfigError."""
    name, where = configured, "agent.node_name"
    if not name:
        name, where = environment.get("NODE_NAME", ""), "NODE_NAME"
    if not name:
        # In a pod the host name is the pod's, and changes with every restart.
        if environment.get("KUBERNETES_SERVICE_HOST"):
            raise ConfigError(
                "the node's name is not known in this pod: set NODE_NAME from fieldRef spec.nodeName, "
                "or agent.node_name"
            )
        name, where = host_name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), "host name"
    if len(name) > MAX_NAME or not name.isprintable() or any(c.isspace() for c in name):
        raise ConfigError(
            f"{where}: {name[:80]!r} is not fit for a node's name: up to {MAX_NAME} printable characters "
            "without spaces are"
        )
    return name


def _install_id(directory: Path) -> str:
    """The id in `directory`, made if there is none yet; raises OSError."""
    file = directory / "install_id"
    with contextlib.suppress(FileNotFoundError):
        try:
            return str(uuid.UUID(file.read_bytes()[:64].decode("ascii").strip()))
        except ValueError:
            _log.warning("%s does not hold an id; a new one is made", file)
            file.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    new = str(uuid.uuid4())
    draft = directory / f".install_id.{new}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(descriptor, "w", encoding="ascii") as stream:
            os.fchmod(descriptor, 0o644)
            stream.write(new + "\n")
            stream.flush()
            os.fsync(descriptor)
        try:
            # link() fails where the file exists, so of two agents that start at once one wins.
            os.link(draft, file)
        except FileExistsError:
            return str(uuid.UUID(file.read_text(encoding="ascii").strip()))
    finally:
        draft.unlink(missing_ok=True)
    return new
