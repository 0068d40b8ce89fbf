"""Which node this is."""

from __future__ import annotations

import logging
import os
import stat
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from expanse_ebpf.config import AgentConfig
from expanse_ebpf.errors import ConfigError
from expanse_ebpf.ship.identity import node_identity, node_name
from expanse_ebpf.ship.sequence import first_sequence


@pytest.mark.parametrize(
    ("configured", "environment", "host", "name"),
    [
        ("gpu017", {"NODE_NAME": "other"}, "host", "gpu017"),
        ("", {"NODE_NAME": "gpu017", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "collector-x7kq2", "gpu017"),
        ("gpu017", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "collector-x7kq2", "gpu017"),
        ("", {}, "login1.cluster", "login1.cluster"),
        ("", {}, "k\udcf6ln", "k\ufffdln"),
    ],
)
def test_name(configured: str, environment: Mapping[str, str], host: str, name: str) -> None:
    assert node_name(configured, environment, host) == name


@pytest.mark.parametrize(
    ("configured", "environment", "words"),
    [
        ("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "NODE_NAME"),
        ("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": ""}, "spec.nodeName"),
        ("two words", {}, "agent.node_name"),
        ("x" * 254, {}, "agent.node_name"),
        ("", {"NODE_NAME": "a\nb"}, "NODE_NAME"),
    ],
)
def test_name_that_is_not_fit_or_not_known(
    configured: str, environment: Mapping[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        node_name(configured, environment, "collector-x7kq2")
    assert "\n" not in str(caught.value)


def test_installation_is_made_once(tmp_path: Path) -> None:
    config = AgentConfig(node_name="n", state_dir=str(tmp_path / "new" / "state"))
    first = node_identity(config, {})
    file = tmp_path / "new" / "state" / "install_id"
    assert file.read_text() == first.install_id + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [p.name for p in file.parent.iterdir()] == ["install_id"]
    assert node_identity(config, {}) == first
    assert first.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_agents_that_start_at_once_agree(tmp_path: Path) -> None:
    config = AgentConfig(node_name="n", state_dir=str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(node_identity, config, {}) for _ in range(40)]
    assert len({m.result().install_id for m in made}) == 1


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe", b"0" * 5000])
def test_broken_file_is_replaced(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "install_id").write_bytes(content)
    made = node_identity(AgentConfig(node_name="n", state_dir=str(tmp_path)), {})
    assert (tmp_path / "install_id").read_text().strip() == made.install_id
    assert "does not hold an id" in caplog.text


def test_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    config = AgentConfig(node_name="n", state_dir=str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        made = node_identity(config, {})
    assert uuid.UUID(made.install_id)
    assert "agent.state_dir" in caplog.text
    # The same for as long as the machine is up, so that a restart is not taken for another node.
    assert node_identity(config, {}) == made


def test_later_agent_begins_above_what_an_earlier_one_used() -> None:
    first = first_sequence()
    assert first < 2**63
    reports_in_its_life = 0
    while first_sequence() == first:
        reports_in_its_life += 1
    assert first_sequence() > first
    with open("/proc/uptime") as uptime:
        assert abs(first / 1e6 - float(uptime.read().split()[0])) < 60
    assert os.getpid()  # no file is needed
