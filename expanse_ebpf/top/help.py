"""What the keys and columns of the live view mean."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

TEXT = """\
[b]Keys[/b]
  ↑ ↓ PgUp PgDn  choose             Enter  all about the chosen one
  g      GPUs; jobs again           {  }   page through what Enter shows
  /      filter by key, name, user, state; GPUs by holder, UUID, state
  Esc    close it; no filter        Space  pause     t  light or dark
                                    ?  this          q  quit
[b]Order of jobs[/b] (GPUs stand by their index)
  c cores   m memory   i I/O   s switches   w wait
  p processes   n key   u user   y Python   r reverse
  h GPUs held   b GPU busy   a SM active   v GPU memory   e power
[b]Columns[/b]
  CORES      CPUs kept busy         HISTORY  the same, over time
  IPC        instructions per cycle MISS     cache misses per reference
  SWITCH/S   context switches       WAIT     tasks waiting for a CPU
  I/O        bytes read and written STATE    traced: a deep trace is on
  GPU        GPUs held; ! sources disagree, ? some are not of this node
  GPU%       time its GPUs are busy SM%      time their SMs are active
  GPU MEM    of its processes       POWER    of GPUs that it holds alone
  PYTHON     the line that was on a CPU most in the last 10 s, or,
             below half a core, where the program waits
  A dash: the figure is not known; 9* is not of all the job's GPUs.
"""


class Help(ModalScreen[None]):
    """What the keys do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space", "dismiss", "Close")
    ]
    CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 78; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; padding: 0 2; background: $surface; }
    Help Static { width: auto; height: auto; }
    """

    def compose(self) -> ComposeResult:
        """One box."""
        with VerticalScroll():
            yield Static(TEXT)
