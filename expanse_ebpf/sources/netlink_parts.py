"""Single modules of pyroute2 without the whole of it.

`import pyroute2` loads some two hundred modules for every protocol it speaks, 14 MiB beside gRPC; the
two that the agent uses take 2.5 MiB. The package is therefore put in place without running its
`__init__`; that is made up for should anything ask the package for a name of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "pyroute2"


def part(name: str) -> ModuleType:
    """The module `pyroute2.NAME`; raises ImportError."""
    if _NAME not in sys.modules:
        _put_in_place()
    return importlib.import_module(f"{_NAME}.{name}")


def _put_in_place() -> None:
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module named {_NAME}")
    package: Any = importlib.util.module_from_spec(spec)
    loader = spec.loader

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if importlib.util.find_spec(f"{_NAME}.{attribute}") is not None:
            return importlib.import_module(f"{_NAME}.{attribute}")
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, attribute)

    package.__getattr__ = missing
    sys.modules[_NAME] = package
