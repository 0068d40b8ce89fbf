"""How the agent and the controller talk: names of the calls and settings that must match on both sides."""

from __future__ import annotations

import os
from typing import Any

DEFAULT_PORT = 9777

COLLECTOR = "expanse.v1.Collector"
QUERY = "expanse.v1.Query"
STREAM = f"/{COLLECTOR}/Stream"
SNAPSHOT = f"/{QUERY}/Snapshot"
WATCH = f"/{QUERY}/Watch"
JOBS = f"/{QUERY}/Jobs"
SERIES = f"/{QUERY}/Series"
PROFILE = f"/{QUERY}/Profile"
TRACE = f"/{QUERY}/Trace"
TRACES = f"/{QUERY}/Traces"
STORED_TRACES = f"/{QUERY}/StoredTraces"
RULES = f"/{QUERY}/Rules"

# gRPC's own limit on a received message is 4 MiB; what is larger cuts the stream, so it is never sent.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024 - 1024

# A job's profile of a minute, packed and unpacked: the agent leaves stacks out until it is no larger, the
# controller refuses what is. Unpacked it is some 40,000 stacks, and reading what was made to be read with
# effort takes up to forty times as much memory.
MAX_PROFILE_BYTES = 1 << 20
MAX_PROFILE_PLAIN_BYTES = 4 << 20

# Of a trace: a part's bytes, and how many parts a node's trace of one window may have.
MAX_TRACE_PART_BYTES = 512 * 1024
MAX_TRACE_PARTS = 512

# A server cuts the link of a client that pings more often than the server allows, so the client's
# interval stays well above the server's minimum, and both allow pings while no call is open.
CLIENT_PING_S = 30.0
SERVER_MIN_PING_S = 10.0
PING_ANSWER_S = 10.0
_PERMIT_WITHOUT_CALLS = 1

_LONGEST_WAIT_S = 60.0

Options = tuple[tuple[str, int], ...]


def client_options(ping_s: float = CLIENT_PING_S) -> Options:
    """Channel settings of every client of the controller; `ping_s` is the keepalive interval, seconds."""
    return (
        ("grpc.keepalive_time_ms", round(ping_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_ANSWER_S * 1000)),
        ("grpc.keepalive_permit_without_calls", _PERMIT_WITHOUT_CALLS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),  # a proxy variable meant for package downloads must not catch reports
        ("grpc.initial_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 10_000),
    )


def server_options(min_ping_s: float = SERVER_MIN_PING_S) -> Options:
    """Server settings of the controller; `min_ping_s` is the least time between a client's pings, seconds."""
    return (
        ("grpc.http2.min_ping_interval_without_data_ms", round(min_ping_s * 1000)),
        ("grpc.keepalive_permit_without_calls", _PERMIT_WITHOUT_CALLS),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", round(PING_ANSWER_S * 1000)),
        ("grpc.so_reuseport", 0),  # else a second controller on the same port is not noticed
    )


def import_grpc() -> Any:
    """The `grpc` module, imported when it is first needed (20 MiB) and told to keep off stderr."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    return grpc


def wait_without_polling(grpc: Any) -> None:
    """Let threads of this process that wait for gRPC sleep until something comes.

    They wake ten times a second so that a signal's handler in Python need not wait for them, which in a
    thread that is not the main one serves nobody, and costs an idle agent more than its reports do. There
    is no public setting; without this one gRPC goes on polling, and all else is the same.
    """
    common: Any = getattr(grpc, "_common", None)
    if hasattr(common, "MAXIMUM_WAIT_TIMEOUT"):
        common.MAXIMUM_WAIT_TIMEOUT = _LONGEST_WAIT_S
