"""The rules of a running controller: looked at now and then, in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from expanse_controller.ingest import Figures
from expanse_controller.presence import age_s
from expanse_controller.store import Store
from expanse_controller.windows import RefusedError, Windows

if TYPE_CHECKING:
    from expanse_controller.rules.engine import Engine, Firing
    from expanse_controller.rules.rule import Rule
    from expanse_ebpf.wire.collector_pb2 import RuleState

_log = logging.getLogger(__name__)


class RuleWatch:
    """Looks at the nodes by the rules, in a thread of its own, and opens the windows that they ask for."""

    def __init__(self, store: Store, windows: Windows, engine: Engine | None) -> None:
        self._store = store
        self._windows = windows
        self._engine = engine
        self._told: set[str] = set()  # what the log has been told of, which it is once
        self._thread = ThreadPoolExecutor(1, "rules")

    def close(self) -> None:
        """Wait for the thread's end."""
        self._thread.shutdown()

    async def states(self) -> list[RuleState]:
        """How each rule stands with each job."""
        return await self._call(self._engine.states) if self._engine else []

    async def run(self, figures: Figures) -> None:
        """Look every LOOK_S, as long as the controller runs."""
        if self._engine is None:
            return
        from expanse_controller.rules.engine import LOOK_S

        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look(self._engine, figures)
            except Exception:  # what a rule makes of some figures must not end the controller
                _log.exception("the rules could not be looked at")

    async def look(self, engine: Engine, figures: Figures) -> None:
        """Look once, and open what is asked for."""
        for firing in await self._call(self._firings, engine):
            figures.rule_firings[firing.rule.name] += 1
            await self._open(engine, firing)
        self._tell(engine)

    def _tell(self, engine: Engine) -> None:
        for rule in engine.errors.keys() - self._told:
            self._told.add(rule)
            _log.warning(
                "rule %s cannot be evaluated for some jobs; `expanse-controller rules show` tells why", rule
            )
        if engine.overlooked and "" not in self._told:
            self._told.add("")  # no rule's name
            _log.warning("rules do not look at %d jobs: there are too many", engine.overlooked)

    def _firings(self, engine: Engine) -> list[Firing]:
        from expanse_controller.rules.engine import NodeView

        now_ns = time.time_ns()
        views = [
            NodeView(
                boot.identity.name,
                boot.identity.install_id,
                newest.previous,
                newest.current,
                age_s(newest, now_ns),
            )
            for boot in self._store.nodes()
            if (newest := boot.newest)
        ]
        return engine.look(views, now_ns)

    async def _open(self, engine: Engine, firing: Firing) -> None:
        places = [
            place
            for place in self._windows.find(firing.key, 0, firing.nodes)
            if place.identity.run == firing.run_by_node.get(place.boot.identity.name, place.identity.run)
        ]
        try:
            window = await self._windows.open(firing.request, places)
        except RefusedError as error:
            await self._call(engine.refused, firing, str(error))
        else:
            await self._call(engine.opened, firing, window.id)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def engine_of(rules: Sequence[Rule]) -> Engine | None:
    """What looks by these rules; None without any: the modules for that are not loaded then."""
    if not rules:
        return None
    from expanse_controller.rules.engine import Engine

    return Engine(rules)
