"""``find``: what a run's metrics say in plain sentences, problems first.

Each rule is a function of a run that yields its findings, in the module of its theme: the pace, the machinery, the age of
the data, what is learned. Thresholds stand there as constants, with the reason for each. What a run has not logged is no
evidence: the rules about it say nothing.
"""

from __future__ import annotations

from typing import get_args

from vla_async.report.findings_age import AGE_RULES
from vla_async.report.findings_base import Finding, Kind
from vla_async.report.findings_learning import LEARNING_RULES
from vla_async.report.findings_machinery import MACHINERY_RULES
from vla_async.report.findings_pace import PACE_RULES
from vla_async.report.run_data import RunData

__all__ = ["RULES", "Finding", "find"]

RULES = (*PACE_RULES, *MACHINERY_RULES, *AGE_RULES, *LEARNING_RULES)


def find(run: RunData) -> list[Finding]:
    """What there is to say about a run: problems, then notes, then what is good, each in the order of the rules."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda finding: get_args(Kind).index(finding.kind))
