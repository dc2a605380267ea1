"""Tables that a command computes and a page of docs/ carries, so that no figure is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ablate import files
from ablate.errors import UsageError


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers and stand right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rewrite(page: Path, name: str, text: str) -> None:
    """Put `text` between `<!-- name:begin -->` and `<!-- name:end -->` of a page.

    Raises:
        UsageError: the page is not there or lacks the marks.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    head, found_begin, rest = old.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise UsageError(f"{page}: needs the lines {begin} and {end}, between which the table goes")
    files.write_text(page, f"{head}{begin}\n{text}\n{end}{tail}")
