"""What a check says. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ablate.errors import UsageError, nearest

Severity = Literal["refuse", "warn", "note"]

# every id that a check may give
IDS = frozenset({
    "aliased-arms", "aliased-reductions", "clip-norm-always", "clip-norm-idle", "cold-start", "collapsed",
    "confounded-arms", "duplicated-steps", "epoch-boundary", "eps-floor", "failure-imbalance", "gaps",
    "group-too-small", "hidden-length-confound", "identical-trajectories", "incomparable-metric", "inert-clip",
    "inert-kl", "inert-observed", "inert-reduction", "inert-tis", "infra-failures", "kl-k1-loss", "loss-scale",
    "low-precision-updates", "mismatch-growth", "mixed-code", "no-group-variance", "no-improvement", "past-cap",
    "past-peak", "post-resume", "prompts-diverged", "rho-mass", "scalar-only-contrast", "scale-confound",
    "scale-confound-observed", "sentinel-length", "single-seed", "token-budget", "truncated-responses",
    "truncated-support", "underpowered", "unequal-caps", "unpaired-seeds",
})  # fmt: skip

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
    """Each finding once, refusals first; those whose id is in `allow` (validity.allow) are marked.

    Raises:
        UsageError: `allow` names an id that no check has.
    """
    if unknown := sorted({*allow} - IDS):
        raise UsageError(f"validity.allow={unknown[0]}: no such check; {nearest(unknown[0], IDS)}")
    found = [replace(f, allowed=f.id in allow) for f in dict.fromkeys(findings)]
    return sorted(found, key=lambda f: _ORDER[f.severity])


def refusals(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop the plan."""
    return [f for f in findings if f.severity == "refuse" and not f.allowed]
