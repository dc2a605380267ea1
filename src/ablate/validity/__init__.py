"""Can this sweep answer its question? Pure checks with an id, a severity and a remedy. Imports no torch.

`check_plan` sees the plan alone, before anything is launched; `check_records` sees what the runs wrote;
`validity.evaluate` (which imports torch) compares the loss coefficients of the arms of a plan.
"""

from ablate.validity.design import pairs
from ablate.validity.finding import Finding, Severity, refusals
from ablate.validity.pilot import read_pilot
from ablate.validity.plan_checks import PILOT_CHECKS, PLAN_CHECKS, Pilot, check_plan, reward_differences
from ablate.validity.record_checks import check_comparison, check_records
from ablate.validity.records import RunRecord, alternatives, load_design, load_records

__all__ = [
    "PILOT_CHECKS", "PLAN_CHECKS", "Finding", "Pilot", "RunRecord", "Severity", "alternatives", "check_comparison",
    "check_plan", "check_records", "load_design", "load_records", "pairs", "read_pilot", "refusals",
    "reward_differences",
]  # fmt: skip
