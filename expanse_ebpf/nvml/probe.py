"""One question about one device at which a worker hung or crashed, to a process of its own.

The worker that asks about the others goes on meanwhile, so that they lose no figures by it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.decode import mapping, number
from expanse_ebpf.nvml.names import has_index_alone
from expanse_ebpf.nvml.patience import Patience
from expanse_ebpf.nvml.process import Process


class Probe:
    """Asks about `device` and no other in `skip`, and waits with `patience`.

    `device` is a UUID, or "index N" of one that could not be opened; that is asked no more than to be opened.
    Raises OSError like Process.
    """

    def __init__(
        self, arguments: Sequence[str], device: str, skip: Collection[str], patience: Patience
    ) -> None:
        import json

        self.device = device
        self.cpu_ns = 0  # known when it has answered
        self.ended = False  # by itself; it must not be killed any more
        self.patience = patience
        self._answered = False
        self.process = Process(arguments)
        others = {name: reasons.HUNG for name in skip if name != device}
        self.process.ask(json.dumps({"round": 1, "at": 0.0, "skip": others}).encode() + b"\n")

    def outcome(self, now: float) -> int | None:
        """0 when the device has answered, else reasons.HUNG or CRASHED; None while it is not known.

        HUNG stands also for an end without an answer, as where NVML cannot be begun just now.
        """
        import json

        for text in self.process.answers():
            try:
                line = mapping(json.loads(text))
            except (ValueError, RecursionError):
                continue
            self.patience.hear(line, now)
            if "nvml" in line and "code" not in mapping(line["nvml"]) and has_index_alone(self.device):
                return 0
            if mapping(line.get("device")).get("uuid") == self.device:
                self._answered = True
            if "end" in line:
                self.cpu_ns = number(line.get("cpu_ns"), (0, 1 << 60)) or 0
                return 0 if self._answered else reasons.HUNG
        if how := self.process.ended():
            self.ended = True
            return reasons.CRASHED if "signal" in how else reasons.HUNG
        return reasons.HUNG if self.patience.is_over(now) else None
