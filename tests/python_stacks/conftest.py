"""The fixture `interp`: each CPython that the tests can have, one after the other."""

from __future__ import annotations

import pytest

from tests.python_stacks import interpreters
from tests.python_stacks.interpreters import Interp


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "interp" in metafunc.fixturenames:
        metafunc.parametrize("interp", interpreters.names(), indirect=True)


@pytest.fixture
def interp(request: pytest.FixtureRequest) -> Interp:
    return interpreters.interpreter(request.param)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make what is missing before the first test begins, since that takes longer than a test may."""
    calls = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    wanted = {params["interp"] for params in calls if "interp" in params}
    if wanted and not session.config.option.collectonly:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for name in sorted(wanted):
            interpreters.interpreter(name, say=reporter.write_line)
