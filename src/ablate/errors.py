"""What a user can do wrong, said in one line, and the exit codes of a sweep and of a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_DONE = 0  # all runs done (a detached launcher: all submitted)
EXIT_REFUSED = 1  # usage, or a refused plan; for a run's own process: it failed
EXIT_SOME_FAILED = 2
EXIT_ALL_FAILED = 3
EXIT_WORK_LEFT = 4  # stopped with work left; the same command goes on


class UsageError(Exception):
    """A user's mistake: printed as one line without a traceback, exit code 1."""


def nearest(name: str, valid: Iterable[str], limit: int = 12) -> str:
    """The part of an error line that helps: the closest valid name, then the valid names themselves."""
    names = sorted({str(v) for v in valid})
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    shown = ", ".join(names[:limit]) + (f", ... ({len(names)} in all)" if len(names) > limit else "")
    return (f"did you mean {close[0]}? " if close else "") + f"valid: {shown or '(none)'}"
