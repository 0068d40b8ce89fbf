"""A controller, and a client as its nodes are, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.controller.process import Client, Controller, client


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    db = tmp_path_factory.mktemp("controller") / "reports.db"
    with Controller(db, "--metrics-listen", "127.0.0.1:0") as running:
        yield running
        code, errors = running.terminate()
        assert code == 0
        assert "Traceback" not in errors


@pytest.fixture(scope="module")
def nodes(controller: Controller) -> Iterator[Client]:
    with client(controller.address) as made:
        yield made
