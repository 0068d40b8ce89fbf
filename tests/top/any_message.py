"""Messages with any values that fit, for Hypothesis."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st

SCALARS: dict[int, st.SearchStrategy[Any]] = {
    1: st.floats(),
    3: st.integers(-(2**63), 2**63 - 1),
    4: st.one_of(st.integers(0, 2000), st.integers(0, 2**64 - 1)),
    5: st.integers(-(2**31), 2**31 - 1),
    8: st.booleans(),
    9: st.text(max_size=6),
    12: st.binary(max_size=6),
    13: st.one_of(st.integers(0, 64), st.integers(0, 2**32 - 1)),
    14: st.sampled_from([0, 1, 2, 3, 4]),
}


def fill(message: Any, draw: st.DrawFn, depth: int = 0, leave: Collection[str] = ()) -> None:
    """Set some of the fields of a protobuf message, but none that is named in `leave`."""
    for field in message.DESCRIPTOR.fields:
        if field.name in leave or (depth and not draw(st.booleans())):
            continue
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for name in draw(st.lists(SCALARS[key.type], max_size=2)):
                if value.message_type is not None:
                    fill(target[name], draw, depth + 1, leave)
                else:
                    target[name] = draw(SCALARS[value.type])
        elif field.message_type is not None:
            if field.is_repeated:
                for _ in range(draw(st.integers(0, 2))):
                    fill(target.add(), draw, depth + 1, leave)
            else:
                fill(target, draw, depth + 1, leave)
        elif field.is_repeated:
            target.extend(draw(st.lists(st.text(max_size=4), max_size=2)))
        else:
            setattr(message, field.name, draw(SCALARS[field.type]))
