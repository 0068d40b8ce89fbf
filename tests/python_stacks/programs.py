"""Programs whose stacks are known, to be profiled: `[*interpreter, "-c", programs.SHARES, "10"]`.

Each runs under CPython 3.8 and later, and its docstring says what must be seen. The first argument is for
how many seconds (10 by default); then it ends by itself. On standard output it prints one line when it is
ready: its pid (in its own PID namespace), then what its docstring says.
"""

from __future__ import annotations


def line(program: str, text: str) -> int:
    """The number of the one line of `program` that contains `text`."""
    (found,) = (number for number, line in enumerate(program.splitlines(), 1) if text in line)
    return found


def _program(text: str) -> str:
    """The program with the words that all of them share, after its docstring, on one line."""
    _, docstring, body = text.split('"""', 2)
    return f'"""{docstring}"""\n{_SHARED}{body}'


_SHARED = (
    "import os, sys, time; "
    "seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0; "
    "number = lambda default: int(sys.argv[2]) if len(sys.argv) > 2 else default; "
    "ready = lambda *more: print(os.getpid(), *more, flush=True) or time.monotonic() + seconds"
)

SHARES = _program('''
"""Of the CPU time, 50 % is spent in `fifty`, 30 % in `thirty`, 20 % in `twenty`, called by `<module>`.

At the end it prints the shares as it measured them. The slices have no constant length, so no rate of
sampling falls into step with them.
"""
from time import thread_time

def fifty(until):
    while thread_time() < until:
        for _ in range(50): pass

def thirty(until):
    while thread_time() < until:
        for _ in range(50): pass

def twenty(until):
    while thread_time() < until:
        for _ in range(50): pass

dice = 1
spent = [0.0, 0.0, 0.0]
end = ready()
until = before = thread_time()
while time.monotonic() < end:
    dice = dice * 16807 % 0x7fffffff
    turn = 0.02 + dice % 40 / 1000  # seconds
    for place, (work, share) in enumerate(((fifty, 0.5), (thirty, 0.3), (twenty, 0.2))):
        until += share * turn
        work(until)
        now = thread_time()
        spent[place] += now - before
        before = now
print(*(share / sum(spent) for share in spent))
''')

ALTERNATING = _program('''
"""`leaf_a` is called by `hot_a` only, `leaf_b` by `hot_b` only; both by `<module>`, in turn, all the time."""

def leaf_a(x):
    for _ in range(20): x += 1
    return x

def leaf_b(x):
    for _ in range(20): x += 1
    return x

def hot_a(x):
    return leaf_a(x) + leaf_a(x)

def hot_b(x):
    return leaf_b(x) + leaf_b(x)

end = ready()
while time.monotonic() < end:
    for _ in range(200):
        hot_a(1)
        hot_b(1)
''')

RECURSION = _program('''
"""`<module>` calls `train_epoch`, that `recurse`, which calls itself; at the end `spin`, with all the time.

The second argument is how many frames of `recurse` there are (500).
"""

def spin():
    while time.monotonic() < end: pass

def recurse(depth):
    if depth > 1:
        recurse(depth - 1)
    else:
        spin()

def train_epoch(depth):
    recurse(depth)

depth = number(500)
sys.setrecursionlimit(depth + 1000)
end = ready()
train_epoch(depth)
''')

BIG_STACK = _program('''
"""As many frames as the second argument says (30; 2 at least), each of a function of its own.

`<module>` calls `level_1`, that `level_2` and so on; the last of them spins, in the file big_stack.py.
"""
depth = number(30)
last = depth - 1
source = "".join("def level_%d(): level_%d()\\n" % (k, k + 1) for k in range(1, last))
source += "def level_%d():\\n    while time.monotonic() < end: pass\\n" % last
exec(compile(source, "big_stack.py", "exec"))
sys.setrecursionlimit(depth + 1000)
end = ready()
level_1()
''')

COROUTINES = _program('''
"""From the outermost: `main`, `fetch`, `collect`, `ids`; at least 95 % of the time is spent in `ids`.

`ids` is a generator, the others are coroutines. It spins in two lines, "# entered" and "# thrown into",
for the same time: after next() and after throw().
"""
import asyncio

def ids():
    while True:
        try:
            stop = time.monotonic() + 0.004
            while time.monotonic() < stop: pass  # entered
            yield 1
        except KeyError:
            stop = time.monotonic() + 0.004
            while time.monotonic() < stop: pass  # thrown into
            yield 2

async def collect():
    numbers = ids()
    for _ in range(10):
        assert next(numbers) == 1
        assert numbers.throw(KeyError()) == 2
        await asyncio.sleep(0)

async def fetch():
    await collect()

async def main():
    while time.monotonic() < end:
        await fetch()

end = ready()
asyncio.run(main())
''')

PARKED = _program('''
"""The main thread spins in `spin`; as many threads as the second argument says (50) wait in `park`.

They wait on a condition (threading.Condition.wait_for, wait) and use no CPU.
"""
import threading

def park():
    global parked
    with condition:
        parked += 1
        condition.notify_all()
        condition.wait_for(lambda: done)

def spin():
    while time.monotonic() < end: pass

condition = threading.Condition()
parked, done, count = 0, False, number(50)
threads = [threading.Thread(target=park) for _ in range(count)]
for thread in threads: thread.start()
with condition:
    condition.wait_for(lambda: parked == count)
end = ready(count)
spin()
with condition:
    done = True
    condition.notify_all()
for thread in threads: thread.join()
''')

NON_ASCII = _program('''
"""Names of every width, from the outermost, each with its file; the last one spins.

`été` in /tmp/é.py; `Modèle.avancer` in /tmp/é.py; `Modèle.avancer.<locals>.训练` in /tmp/é.py; `训练.步`
(a class and its method) in /tmp/中.py; `𠀋` in /tmp/😀.py; `😀` in /tmp/😀.py. Before 3.11 a code object has
no qualified name: then only what follows the last dot. There are no such files.
"""

def load(path, source):
    exec(compile(source, path, "exec"), globals())

load("/tmp/é.py", """
class Modèle:
    def avancer(self):
        def 训练():
            步骤()
        训练()

def été():
    Modèle().avancer()
""")
load("/tmp/中.py", """
class 训练:
    def 步(self):
        𠀋()

步骤 = 训练().步
""")
load("/tmp/😀.py", """
def 𠀋():
    smile()

def smile():
    while time.monotonic() < end: pass
""")
# No identifier may be 😀, but the name of a code object may.
names = {"co_name": "😀"}
if sys.version_info >= (3, 11): names["co_qualname"] = "😀"
smile.__code__ = smile.__code__.replace(**names)
end = ready()
été()
''')

FORKS = _program('''
"""As many forked processes as the second argument says (3), number K of them spins in `work_K`.

`<module>` calls `start`, that `work_K`. The parent waits in `wait` (os.waitpid). The pids of the
children, in order, follow on the line.
"""

def start(work):
    work(time.monotonic() + seconds)

def wait(children):
    return [os.waitpid(child, 0)[1] for child in children]

children = []
for k in range(number(3)):
    exec("def work_%d(end):\\n    while time.monotonic() < end: pass\\n" % k)
    work = globals()["work_%d" % k]
    child = os.fork()
    if child == 0:
        try:
            start(work)
        finally:
            os._exit(0)
    children.append(child)
ready(*children)
sys.exit(any(wait(children)))
''')

QUEUE_WAIT = _program('''
"""The main thread waits in queue.get under `DataLoader.__next__` (`__next__` before 3.11), called by `train`.

A worker thread takes 50 ms for each batch (`produce`, in time.sleep); `train` uses 1 ms of CPU for it in
`step`. The first two arguments of the line are the thread ids of the main thread and the worker.
"""
import queue, threading

class DataLoader:
    def __init__(self):
        self.batches = queue.Queue()

    def __iter__(self):
        return self

    def __next__(self):
        batch = self.batches.get()
        if batch is None:
            raise StopIteration
        return batch

def produce(batches):
    while time.monotonic() < end:
        time.sleep(0.05)
        batches.put("batch")
    batches.put(None)

def step(batch):
    stop = time.thread_time() + 0.001
    while time.thread_time() < stop: pass

def train(loader):
    for batch in loader:
        step(batch)

end = time.monotonic() + seconds
loader = DataLoader()
worker = threading.Thread(target=produce, args=(loader.batches,))
worker.start()
ready(threading.get_native_id(), worker.native_id)
train(loader)
worker.join()
''')

GIL = _program('''
"""Four threads that keep their state: their ids follow on the line in this order.

The main thread spins in `spin` and holds the GIL all the time. `wait` waits for the GIL. `nap` is in
time.sleep and `digest` in a C function that uses a CPU: both have released the GIL. Without a GIL, `wait`
is in time.sleep as well. At the end `nap` and `digest` may wait for the GIL for a moment.
"""
import threading
from _hashlib import pbkdf2_hmac

def spin():
    while time.monotonic() < end: pass

def wait():
    while time.monotonic() < end:
        time.sleep(0.05)

def nap():
    time.sleep(seconds + 0.5)

def digest(turns):
    pbkdf2_hmac("sha256", b"", b"", turns)

before = time.thread_time()
pbkdf2_hmac("sha256", b"", b"", 100_000)
turns = int(100_000 / (time.thread_time() - before) * (seconds + 0.5))
threads = [threading.Thread(target=nap), threading.Thread(target=digest, args=(turns,))]
for thread in threads: thread.start()
time.sleep(0.05)
# From here on nobody is asked to give the GIL up: `wait` will not get it back after its first sleep.
end = time.monotonic() + seconds
threads.insert(0, threading.Thread(target=wait))
threads[0].start()
sys.setswitchinterval(1000)
ready(threading.get_native_id(), *(thread.native_id for thread in threads))
spin()
sys.setswitchinterval(0.005)
for thread in threads: thread.join()
''')

LEADER_GONE = _program('''
"""The main thread has ended, by the exit system call, and is a zombie; a thread spins on in `work`.

The id of that thread follows on the line.
"""
import ctypes, platform, threading

def work():
    while alive.value: time.sleep(0.001)
    until = ready(threading.get_native_id())
    while time.monotonic() < until: pass  # alone
    os._exit(0)

set_tid_address, leave = {"x86_64": (218, 60), "aarch64": (96, 93)}[platform.machine()]
system = ctypes.CDLL(None).syscall  # releases the GIL for a call
alive = ctypes.c_int(1)
system(ctypes.c_long(set_tid_address), ctypes.byref(alive))  # which the kernel makes 0 when the thread ends
threading.Thread(target=work).start()
system(ctypes.c_long(leave), ctypes.c_long(0))
''')

SHORT = _program('''
"""Uses 80 ms of CPU time in `brief`, called by `<module>`, and is gone. It takes no arguments."""

def brief():
    until = time.thread_time() + 0.08
    while time.thread_time() < until: pass

ready()
brief()
''')

SUBINTERPRETER = _program('''
"""A thread runs a second interpreter, in which `<module>` calls `outer`, that `inner`, which spins.

The main thread, of the first interpreter, waits in `wait` (threading.Thread.join) meanwhile; the thread's
own stack in the first interpreter ends in `run`. The id of that thread follows on the line.
"""
import threading
try:
    import _interpreters as interpreters  # 3.13 on
except ImportError:
    import _xxsubinterpreters as interpreters

INSIDE = """
import os, time

def inner():
    while time.monotonic() < end: pass

def outer():
    inner()

end = time.monotonic() + SECONDS
os.write(1, b"PID TID\\\\n")
outer()
"""

def run():
    pids = str(os.getpid()), str(threading.get_native_id())
    other = interpreters.create()
    code = INSIDE.replace("SECONDS", str(seconds)).replace("PID", pids[0]).replace("TID", pids[1])
    failed = interpreters.run_string(other, code)
    interpreters.destroy(other)
    if failed is not None: os._exit(1)

def wait(thread):
    thread.join()

thread = threading.Thread(target=run)
thread.start()
wait(thread)
''')

DYNAMIC = _program('''
"""`gen_K` calls only `leaf_K`, which spins for 20 ms; then both are deleted and K is one more.

Each K has a file of its own, gen_K.py, where `gen_K` is in line K + 1 and `leaf_K` spins in line K + 3. Code
objects come to lie where others were: at the end it prints how many did, of how many.
"""
seen, reused, k = set(), 0, 0
end = ready()
while time.monotonic() < end:
    source = "\\n" * k + (
        "def gen_%d(stop): leaf_%d(stop)\\ndef leaf_%d(stop):\\n" % (k, k, k)
        + "    while time.monotonic() < stop: pass\\n"
    )
    exec(compile(source, "gen_%d.py" % k, "exec"))
    gen, leaf = globals().pop("gen_%d" % k), globals()["leaf_%d" % k]
    places = {id(gen.__code__), id(leaf.__code__)}
    reused += len(places & seen)
    seen |= places
    gen(time.monotonic() + 0.02)
    del gen, leaf, globals()["leaf_%d" % k]
    k += 1
print(reused, 2 * k)
''')

LONG_TABLE = _program('''
"""`long` spins in its last line, whose number follows on the line, in the file long_table.py.

Its line table is longer than 64 KiB; the second number is its length in bytes.
"""
lines = 34_000 if sys.version_info < (3, 11) else 14_000
source = "def long(x):\\n" + "    x = (x,\\n x)[0]\\n" * (lines // 2)
source += "    while time.monotonic() < end: x = x\\n"
exec(compile(source, "long_table.py", "exec"))
code = long.__code__
table = code.co_lnotab if sys.version_info < (3, 10) else code.co_linetable
end = ready(source.count("\\n"), len(table))
long(1)
''')
