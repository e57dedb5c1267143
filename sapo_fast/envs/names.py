"""The error message for a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """The text for "no such name": what was given, the nearest known ones, and all of them."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"unknown {what} {name!r}{hint} (known: {', '.join(known)})"
