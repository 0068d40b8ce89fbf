"""What an interpreter says of its own line tables; run by each of them, from 3.8 on, with -c.

Prints JSON: for many code objects the table, the first line, and runs (offset, end, line) by source:
`live` (f_lasti and f_lineno of frames), `co_lines` (3.10 on) and `addr2line` (PyCode_Addr2Line).
"""

# ruff: noqa: B905, UP036 (3.8 has no zip(strict=), and the versions are the point)

import ast
import json
import os
import sys
from pathlib import Path

TRICKY = """
import asyncio, contextlib
def decorate(*a):
    return lambda f: f
@decorate(1,
          2)
@decorate(here())
class Shapes(
        object,
        metaclass=type):
    'Doc.'
    x = 1

    @property

    def y(self):
        return (self
                .x
                + here()
                + 1)
    z = [here()
         for i in range(2)
         if i or
         here()]
def generate(n):
    for i in range(n):
        try:
            got = yield i
            here()
        except ValueError:
            here(); yield here()
        finally:
            here()
def closes():
    with contextlib.suppress(ValueError), \\
         contextlib.suppress(KeyError):
        here()
        raise KeyError
    try:
        try:
            here()
            raise ValueError
        finally:
            here()
    except (ValueError,
            TypeError) as error:
        here()
    else:
        here()
    while True:
        here()
        if here() == 0:
            break
    return dict(a=here(),

                b=here(
                    1),
                c=lambda: (
                    here()))["c"]()
async def waits():
    async with Door() as door:
        await asyncio.sleep(
            0)
        here()
    return [
        here() + i
        async for i in counts()
        if i]
async def counts():
    for i in range(3):
        yield (
            here())
class Door:
    async def __aenter__(self): here()
    async def __aexit__(
        self,
        *a): here()
def compare(a, b): return (here() <
    a
    <
    b if a else

    {k: v
     for k, v in [(1,
                   here())]})
x = Shapes().y; g = generate(2)
next(g)
g.throw(ValueError)
list(g)
closes()
asyncio.run(waits())
compare(1, 2); compare(0, 0)
"""
if sys.version_info >= (3, 10):
    TRICKY += """
def choose(x):
    match x:
        case [a, b] if (a
                        or b):
            return here()
        case {"k": v}:
            here()
        case _:
            pass
choose([1, 2]); choose({"k": 1}); choose(1)
"""
if sys.version_info >= (3, 11):
    TRICKY += """
try:
    raise ExceptionGroup("", [ValueError(), KeyError()])
except* ValueError:
    here()
except* KeyError as e:
    here()
"""
if sys.version_info >= (3, 12):
    TRICKY += """
type Pair[T] = tuple[T,
    T]
def generic[T](x: T) -> T:
    return [here() for _ in [1]] and [
        x for x in [here(),
                    here()]]
generic(1)
f"{here()} {
    here()}"
"""

LIBRARY = """
argparse asyncio/base_events asyncio/tasks contextlib dataclasses enum http/client inspect pickle queue
selectors socket subprocess tempfile threading traceback unittest/mock
"""


class Dice:
    """Numbers from 0 on, the same ones everywhere; not every build has `random`."""

    state = 4

    def below(self, end):
        self.state = self.state * 16807 % 0x7FFFFFFF
        return self.state // 256 % end

    def choice(self, options):
        return options[self.below(len(options))]


def code_objects(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            yield from code_objects(constant)


def long_function(lines):
    body = "".join("    x = (x,\n  1)\n" if i % 9 else "    x = 1\n" for i in range(lines))
    return compile("def f(x):\n" + body, "long", "exec").co_consts[0]


def jumping(lines):
    """A function whose statements stand in lines of one's own choice."""
    tree = ast.parse("def f(x):\n" + "    x = x\n" * len(lines))
    for statement, line in zip(tree.body[0].body, lines):
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = line
    return compile(tree, "jumping", "exec").co_consts[0]


TABLE = "co_lnotab" if sys.version_info < (3, 10) else "co_linetable"


def made_table(dice, units):
    """A valid table of any content for bytecode of so many code units."""
    if sys.version_info < (3, 10):
        return bytes(dice.choice((0, 1, 2, dice.below(256))) for _ in range(units // 8 * 2))
    table = bytearray()
    while units:
        if sys.version_info < (3, 11):
            size = min(units, dice.choice((0, 1, 2, 127)))
            size = size if units > 1 else 1
            table += bytes((size * 2, dice.below(256)))
        else:
            size = min(units, 1 + dice.below(8))
            code = dice.below(16)
            table.append(0x80 | code << 3 | size - 1)
            delta = dice.choice((0, 1, -1, 40, dice.below(140000) - 70000))
            numbers = [abs(delta) << 1 | (delta < 0), dice.below(300), dice.below(300), 0]
            for number in numbers[: max(0, code - 13) * 3 + 1] if code in (13, 14) else ():
                while number > 63:
                    table.append(64 | number & 63)
                    number >>= 6
                table.append(number)
            table += bytes(dice.below(128) for _ in range(1 if code < 10 else 2 if code < 13 else 0))
        units -= size
    return bytes(table)


try:
    import ctypes

    addr2line = ctypes.pythonapi.PyCode_Addr2Line
    addr2line.argtypes = (ctypes.py_object, ctypes.c_int)
except ImportError:
    addr2line = None
printed = []


def tell(code, live=()):
    size = len(code.co_code)
    said = {"live": list(live)}
    if hasattr(code, "co_lines"):
        said["co_lines"] = [(start, end, line) for start, end, line in code.co_lines()]
    if addr2line is not None:
        # It looks from the beginning each time: not at each instruction of the longest.
        step = 2 if size < 4000 else 2 * (size // 2000)
        offsets = range(-step, size, step)
        said["addr2line"] = [(offset, offset + 1, addr2line(code, offset)) for offset in offsets]
    printed.append(
        {
            "name": code.co_name,
            "table": getattr(code, TABLE).hex(),
            "first": code.co_firstlineno,
            "said": said,
        }
    )


seen = {}


def here(*_):
    frame = sys._getframe(1)
    seen.setdefault(frame.f_code, []).append((frame.f_lasti, frame.f_lasti + 1, frame.f_lineno))
    return 0


exec(compile(TRICKY, "tricky", "exec"), {"here": here})
for code, live in seen.items():
    tell(code, live)
for code in code_objects(compile(TRICKY, "tricky", "exec")):
    tell(code)
for name in LIBRARY.split():
    path = Path(os.__file__).parent / (name + ".py")
    if path.exists():
        for code in code_objects(compile(path.read_text(encoding="utf-8"), str(path), "exec")):
            tell(code)
tell(long_function(34000 if sys.version_info < (3, 11) else 6000))
tell(
    compile("def f(x):\n x()\n" + "\n" * 33000 + " return x(\n" + "\n" * 128 + "x)", "gap", "exec").co_consts[
        0
    ]
)
dice = Dice()
far = 2**30 if sys.version_info >= (3, 11) else 2**20  # before, 127 lines take two bytes
chosen = [5, 132, 5, 260, 3, 40000, 2, far, 1, 128, 129, 1] + [1 + dice.below(2**16) for _ in range(40)]
tell(jumping(chosen))
base = jumping(list(range(2, 160)))
for _ in range(100):
    tell(base.replace(**{TABLE: made_table(dice, len(base.co_code) // 2), "co_firstlineno": 2**24}))
json.dump({"codes": printed}, sys.stdout)
