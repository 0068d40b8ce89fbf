"""Stand-ins of NVML, and processes that have loaded them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand_ins.caller import Call, Caller
from tests.stand_ins.nvml import StandIn
from tests.stand_ins.real_nvml import MissingError, real_library


@pytest.fixture
def gpus(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "nvml", devices=2, minors=[3, 2])


@pytest.fixture
def call() -> Iterator[Call]:
    callers: list[Caller] = []

    def begin(gpus: StandIn, **options: bool) -> Caller:
        callers.append(Caller(gpus.library, **options))
        return callers[-1]

    yield begin
    for caller in callers:
        caller.close()


@pytest.fixture(scope="session")
def real() -> Path:
    try:
        return real_library()
    except MissingError as error:
        pytest.skip(str(error))
