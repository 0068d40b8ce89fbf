"""Results for others: what of a bench may leave the machine, as the bytes that are sent.

`sending_form.DOCUMENT` is the list of all that is sent: nothing else is, whatever the records hold. What is
built and what is read from a file go through the same list.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import asdict
from typing import Any, Final

from expanse_ebpf import __version__
from expanse_ebpf.bench.plan import Arm, Plan, Workload
from expanse_ebpf.bench.plan_checks import OF_WORKLOADS
from expanse_ebpf.bench.results import End, Machine, Results, Run, Session
from expanse_ebpf.bench.sending_form import ARMS, DOCUMENT, FORM, OTHER, PROGRAMS, WORKLOADS
from expanse_ebpf.errors import ConfigError, UnavailableError

MOST_BYTES: Final = 16 << 20


class UnsentError(UnavailableError):
    """The results did not arrive, or it is not known that they did."""


def document(results: Results, plan: Plan | None) -> bytes:
    """What is sent of a bench: JSON, an object per line where there are many.

    Without the plan a workload or arm is known only where its name is that of a kind. Raises ConfigError
    when no run is in the results.
    """
    if not any(results.runs):
        raise ConfigError(f"{results.folder}: there is no run yet, so nothing to send")
    workloads = {each.name: each for each in plan.workloads} if plan else {}
    arms = {each.name: each for each in plan.arms} if plan else {}
    cells = results.cells()
    of_workloads = _labels(
        {
            name: workloads[name].kind if name in workloads else name if name in WORKLOADS else OTHER
            for name in (*workloads, *(name for name, _ in cells))
        }
    )
    of_arms = _labels(
        {
            name: _arm_kind(arms[name]) if name in arms else name if name in ARMS else OTHER
            for name in (*arms, *(name for _, name in cells))
        }
    )
    stamped = [r for r in results.records if not isinstance(r, End)]
    begin = min(r.started_ns if isinstance(r, Run) else r.time_ns for r in stamped)

    def cell(record: Run | End) -> dict[str, Any]:
        named = {"workload": of_workloads.get(record.workload), "arm": of_arms.get(record.arm)}
        return {**asdict(record), **named}

    def after(time_ns: int) -> float:
        return (time_ns - begin) // 10**8 / 10

    return _rendered(
        _taken(
            DOCUMENT,
            {
                "form": FORM,
                "machine": _machine(results.machine),
                "plan": {**asdict(plan), "controller_elsewhere": bool(plan.controller)} if plan else None,
                "workloads": [_workload(workloads.get(n), label) for n, label in of_workloads.items()],
                "arms": [_arm(arms.get(n), label) for n, label in of_arms.items()],
                "sessions": [
                    {**asdict(r), "begin_s": after(r.time_ns)}
                    for r in results.records
                    if isinstance(r, Session)
                ],
                "runs": [{**cell(run), "begin_s": after(run.started_ns)} for run in results.runs],
                "ends": [cell(r) for r in results.records if isinstance(r, End)],
            },
            "",
            strict=False,
        )
    )


def checked(data: bytes) -> bytes:
    """A document that was kept, built anew from what may be sent; ValueError for anything else in it."""
    if len(data) > MOST_BYTES:
        raise ValueError("it is too long")
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict) or "form" not in value:
        raise ValueError("it has no number of its form")
    if value["form"] != FORM:
        raise ValueError(f"its form is another than {FORM}; send it with the version that made it")
    return _rendered(_taken(DOCUMENT, value, "", strict=True))


def _taken(form: Any, value: Any, where: str, *, strict: bool) -> Any:
    """Of a value what its form allows. What does not fit is left out, or with `strict` a ValueError."""
    if isinstance(form, dict) and isinstance(value, dict):
        unknown = sorted(value.keys() - form.keys())
        if strict and unknown:
            raise ValueError(f"{f'{where}.{unknown[0]}'.lstrip('.')!r:.80} is not known")
        made = {
            key: _taken(inner, value[key], f"{where}.{key}".lstrip("."), strict=strict)
            for key, inner in form.items()
            if value.get(key) is not None or (strict and key in value)
        }
        return {key: each for key, each in made.items() if each is not None}
    if isinstance(form, list) and isinstance(value, (list, tuple)):
        return [_taken(form[0], each, where, strict=strict) for each in value]
    clean = None if isinstance(form, (dict, list)) else form(value)
    if strict and (clean is None or clean != value or type(clean) is not type(value)):
        raise ValueError(f"{where} has a value that is never sent")
    return clean


def _rendered(value: dict[str, Any]) -> bytes:
    """JSON for people to look through: long lists have a line for each of their objects."""
    parts = []
    for key, each in value.items():
        text = json.dumps(each, allow_nan=False)
        if isinstance(each, list) and each:
            text = "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in each) + "\n ]"
        parts.append(f' "{key}": {text}')
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode("ascii")


def _labels(kinds: dict[str, str]) -> dict[str, str]:
    """A name to its kind, numbered where there are several of one."""
    of_kind, so_far, labels = Counter(kinds.values()), Counter[str](), {}
    for name, kind in kinds.items():
        so_far[kind] += 1
        labels[name] = kind if of_kind[kind] == 1 else f"{kind}-{so_far[kind]}"
    return labels


def _machine(machine: Machine | None) -> dict[str, Any] | None:
    if machine is None:
        return None
    tools = {program.rpartition("/")[2]: version for program, version in machine.tools.items()}
    return {**asdict(machine), "tools": tools, "memory_gib": math.ceil(machine.memory_bytes / 2**30)}


def _workload(workload: Workload | None, label: str) -> dict[str, Any]:
    if workload is None:
        return {"workload": label}
    fields = {key: value for key, value in asdict(workload).items() if key in OF_WORKLOADS[workload.kind]}
    if "images" in fields:
        fields["own_images"] = bool(workload.images)
    return {**fields, "workload": label}


def _arm(arm: Arm | None, label: str) -> dict[str, Any]:
    if arm is None or arm.kind == "command":
        return {"arm": label}
    return {"arm": label, "cpu_counters": arm.cpu_counters, "other_settings": bool(arm.settings or arm.rules)}


def _arm_kind(arm: Arm) -> str:
    if arm.kind != "command":
        return arm.kind
    name = arm.command[0].rpartition("/")[2] if arm.command else ""
    return name if name in PROGRAMS else "command"


# ---- over the network


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Results go where the user said, or nowhere."""

    def redirect_request(self, *_: Any) -> None:
        """Leave the answer as the error that it is here."""


def post(url: str, body: bytes, *, timeout_s: float = 30.0) -> int:
    """Send by POST and return the HTTP status, from 200 to 299; raises UnsentError with the reason."""
    headers = {"Content-Type": "application/json", "User-Agent": f"expanse-ebpf/{__version__}"}
    request = urllib.request.Request(url, body, headers, method="POST")
    server = urllib.parse.urlsplit(url).hostname
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        moved = "; it points elsewhere, give that URL" if 300 <= error.code < 400 else ""
        raise UnsentError(f"{server} answered with HTTP status {error.code}{moved}") from None
    except urllib.error.URLError as error:
        cause = error.reason
        reason = (
            getattr(cause, "verify_message", "") or getattr(cause, "strerror", "") or type(cause).__name__
        )
        raise UnsentError(f"{server} cannot be reached: {reason}") from None
    except TimeoutError:
        raise UnsentError(f"{server} did not answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise UnsentError(f"{server} gave no answer: {type(error).__name__}") from None
