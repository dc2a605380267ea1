"""What a check says. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["refuse", "warn", "note"]

_ORDER = {"refuse": 0, "warn": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """What a check found. Example: Finding("single-seed", "warn", "one seed per arm: ...; add seed=0,1,2", "sweep")

    `where` is `sweep`, an arm, `<arm> vs <arm>`, or a run's folder `<arm>/seed=<n>`.
    """

    id: str
    severity: Severity
    message: str
    where: str
    allowed: bool = False

    def concerns(self, arm: str) -> bool:
        """Whether a table should name this finding beside `arm`; a finding about the sweep is beside every arm."""
        places = [place.rpartition("/seed=")[0] or place for place in self.where.split(" vs ")]
        return self.where == "sweep" or arm in places


def marked(findings: Iterable[Finding], allow: Collection[str]) -> list[Finding]:
    """Each finding once, refusals first; those whose id is in `allow` (validity.allow) are marked."""
    found = [replace(f, allowed=f.id in allow) for f in dict.fromkeys(findings)]
    return sorted(found, key=lambda f: _ORDER[f.severity])


def refusals(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop the plan."""
    return [f for f in findings if f.severity == "refuse" and not f.allowed]
