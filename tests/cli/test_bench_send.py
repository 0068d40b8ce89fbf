"""`expanse-ebpf bench send`: what is shown is what arrives, and nothing does that nobody agreed to."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.bench.results import Results
from tests.bench.test_sending import records
from tests.cli import nobody

SECRET = "secret-name.example.org"


class Server(ThreadingHTTPServer):
    """A receiver that keeps what comes."""

    status, location = 201, ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.url = f"http://127.0.0.1:{self.server_port}/results"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Count every connection, whatever comes of it."""
        self.connections += 1
        super().process_request(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers as the server says."""

    server: Server

    def do_POST(self) -> None:
        """Take a body."""
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append(dict(self.headers))
        self.server.asked.set()
        self.server.go_on.wait(30)
        self.send_response(self.server.status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing to the terminal."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bench's results, with a name in every string."""
    place = tmp_path / "cost"
    place.mkdir()
    results = Results(place)
    for record in records(SECRET, workload="train", arm="near"):
        results.add(record)
    plan = f"""
        [workloads.train]
        kind = "command"
        command = ["/srv/{SECRET}/train"]
        [arms.near]
        kind = "command"
        command = ["py-spy", "--name", "{SECRET}"]
    """
    (place / "plan.toml").write_text(plan)
    return place


def argv(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", nobody.MAIN, "bench", "send", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and not k.startswith("EXPANSE_")}
    return kept | {"EXPANSE_BENCH_SEND_URL": ""} | more


def send(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv(*arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(**more),
        timeout=60,
        check=False,
    )


def answered(answer: bytes, *arguments: str | Path) -> tuple[int, bytes, str]:
    """The exit code, what was shown, and what was said on a terminal on which `answer` is typed."""
    master, slave = pty.openpty()
    try:
        with subprocess.Popen(
            argv(*arguments), stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=environment()
        ) as process:
            said = b""
            while b"[y/N]" not in said:
                said += os.read(master, 1000)
            os.write(master, answer)
            shown, _ = process.communicate(timeout=60)
        os.write(slave, b"END")
        while b"END" not in said:
            said += os.read(master, 1000)
    finally:
        os.close(master)
        os.close(slave)
    return process.returncode, shown, said.decode()


def test_what_arrives_is_byte_for_byte_what_was_shown(folder: Path, server: Server) -> None:
    code, shown, said = answered(b"y\n", folder, "--url", server.url)
    assert (code, server.bodies, server.connections) == (0, [shown], 1)
    assert server.headers[0]["Content-Type"] == "application/json"
    assert f"these {len(shown)} bytes would be sent to {server.url}" in said
    assert "sent: HTTP status 201" in said
    assert SECRET.encode() not in shown
    assert json.loads(shown)["runs"][0]["arm"] == "py-spy"
    assert sorted(each.name for each in folder.iterdir()) == ["plan.toml", "runs.jsonl"]


def test_the_headers_say_no_more_than_they_must(folder: Path, server: Server) -> None:
    assert send(folder, "--url", server.url, "--yes").returncode == 0
    headers = server.headers[0]
    assert headers.pop("User-Agent").startswith("expanse-ebpf/")
    assert headers.keys() == {"Accept-Encoding", "Content-Length", "Content-Type", "Host", "Connection"}


@pytest.mark.parametrize("answer", [b"\n", b"n\n"])
def test_who_does_not_agree_sends_nothing(answer: bytes, folder: Path, server: Server) -> None:
    code, shown, said = answered(answer, folder, "--url", server.url)
    assert (code, server.connections) == (1, 0)
    assert json.loads(shown)
    assert "nothing was sent" in said


def test_ctrl_c_at_the_question_sends_nothing(folder: Path, server: Server) -> None:
    master, slave = pty.openpty()
    try:
        with subprocess.Popen(
            argv(folder, "--url", server.url),
            stdin=slave,
            stdout=subprocess.DEVNULL,
            stderr=slave,
            env=environment(),
        ) as process:
            said = b""
            while b"[y/N]" not in said:
                said += os.read(master, 1000)
            # The question is printed by C code; a signal before it reads would only be seen after the answer.
            while " S " not in Path(f"/proc/{process.pid}/stat").read_text():
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        os.write(slave, b"END")
        while b"END" not in said:
            said += os.read(master, 1000)
        assert b"Traceback" not in said
    finally:
        os.close(master)
        os.close(slave)
    assert server.connections == 0


def test_ctrl_c_while_sending_says_that_it_may_have_arrived(folder: Path, server: Server) -> None:
    server.go_on.clear()
    with subprocess.Popen(
        argv(folder, "--url", server.url, "--yes"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert server.asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.decode().splitlines()[1:] == ["ended while sending: it may have arrived, or not"]


def test_without_a_terminal_only_yes_agrees(folder: Path, server: Server) -> None:
    done = send(folder, "--url", server.url)
    assert (done.returncode, server.connections) == (2, 0)
    assert b"no terminal to ask on" in done.stderr
    done = send(folder, "--yes", EXPANSE_BENCH_SEND_URL=server.url)
    assert (done.returncode, server.bodies) == (0, [done.stdout])


def test_the_url_of_the_flag_wins_over_that_of_the_configuration(folder: Path, server: Server) -> None:
    with serving() as other:
        assert send(folder, "--url", server.url, "--yes", EXPANSE_BENCH_SEND_URL=other.url).returncode == 0
        assert (server.connections, other.connections) == (1, 0)


def test_without_a_url_it_shows_and_says_what_to_do(folder: Path) -> None:
    done = send(folder, "--yes")
    assert done.returncode == 2
    assert json.loads(done.stdout)
    said = done.stderr.decode()
    assert all(words in said for words in ("--url", "send_url", "EXPANSE_BENCH_SEND_URL", "--output"))
    assert said.count("\n") == 1


def test_a_file_is_kept_and_sent_later(folder: Path, server: Server, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    done = send(folder, "--output", kept)
    assert (done.returncode, done.stderr) == (0, b"")
    code, shown, _ = answered(b"n\n", "--file", kept, "--url", server.url)
    assert (code, shown, server.connections) == (1, kept.read_bytes(), 0)
    code, shown, _ = answered(b"y\n", "--file", kept, "--url", server.url)
    assert (code, shown, server.bodies) == (0, kept.read_bytes(), [kept.read_bytes()])
    again = send(folder, "--output", kept)
    assert again.returncode == 2
    assert b"is there already" in again.stderr


def test_a_file_with_something_else_in_it_is_not_sent(folder: Path, server: Server, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    send(folder, "--output", kept)
    kept.write_text(kept.read_text().replace('"form": 1', '"form": 1, "host": "x"'))
    done = send("--file", kept, "--url", server.url, "--yes")
    assert (done.returncode, done.stdout, server.connections) == (2, b"", 0)
    assert b"'host' is not known" in done.stderr


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "127.0.0.1 answered with HTTP status 404; kept"),
        (500, "HTTP status 500"),
        (302, "points elsewhere"),
        (307, "points elsewhere"),
        (308, "points elsewhere"),
    ],
)
def test_what_is_refused_is_kept_and_no_other_host_is_asked(
    status: int, words: str, folder: Path, server: Server
) -> None:
    with serving() as other:
        server.status, server.location = status, other.url if 300 <= status < 400 else ""
        done = send(folder, "--url", server.url, "--yes")
        assert (done.returncode, server.connections, other.connections) == (1, 1, 0)
    assert words in done.stderr.decode()
    assert (folder / "to-send.json").read_bytes() == done.stdout
    server.status, server.location = 200, ""
    assert send("--file", folder / "to-send.json", "--url", server.url, "--yes").returncode == 0
    assert server.bodies[1] == done.stdout


def closed_port() -> int:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_a_server_that_is_not_there(folder: Path) -> None:
    done = send(folder, "--url", f"http://127.0.0.1:{closed_port()}/", "--yes")
    assert done.returncode == 1
    assert b"error: 127.0.0.1 cannot be reached: Connection refused; kept" in done.stderr


def test_the_password_of_a_proxy_is_not_in_a_message(folder: Path) -> None:
    proxy = f"http://bob:hunter2@127.0.0.1:{closed_port()}"
    done = send(folder, "--url", "http://results.example/", "--yes", http_proxy=proxy)
    assert done.returncode == 1
    assert b"results.example cannot be reached" in done.stderr
    assert b"bob" not in done.stderr
    assert b"hunter2" not in done.stderr


def test_a_server_that_speaks_no_tls_or_no_http(folder: Path, server: Server) -> None:
    done = send(folder, "--url", server.url.replace("http:", "https:"), "--yes")
    assert (done.returncode, server.bodies) == (1, [])
    assert b"127.0.0.1 cannot be reached" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as plain:
        thread = threading.Thread(target=lambda: _rude(plain))
        thread.start()
        done = send(folder, "--url", f"http://127.0.0.1:{plain.getsockname()[1]}/", "--yes")
        thread.join()
    assert done.returncode == 1
    assert b"127.0.0.1 gave no answer" in done.stderr


def _rude(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while not connection.recv(1 << 16).endswith(b"}\n"):
            pass
        connection.sendall(b"\x1b[2J what?\r\n\r\n")


def test_the_way_that_is_not_encrypted_is_called_so(folder: Path) -> None:
    done = send(folder, "--url", "http://results.example/")
    assert b"http://results.example/, which is not encrypted on its way" in done.stderr
    done = send(folder, "--url", "https://results.example/")
    assert b"encrypted" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either DIR"),
        (("DIR", "--file", "x"), "either DIR"),
        (("DIR", "--output", "x", "--url", "https://x.example"), "alone with DIR"),
        (("DIR", "--url", "example.org"), "--url: 'example.org' is not a URL"),
        (("DIR", "--url", "https://bob:hunter2@example.org"), "a user's name"),
        (("/nowhere", "--output", "x"), "no bench was run here"),
        (("--file", "/nowhere"), "No such file"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str, folder: Path) -> None:
    done = send(*(str(folder) if each == "DIR" else each for each in arguments))
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr.decode()
    assert b"hunter2" not in done.stderr


def test_the_help_has_examples() -> None:
    done = send("--help")
    assert done.returncode == 0
    assert b"bench send --file" in done.stdout
