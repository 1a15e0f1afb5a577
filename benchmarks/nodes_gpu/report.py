"""What a part found: facts, and checks that passed or failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

OK, FAILED, ABSENT = "ok", "FAILED", "not here"


class NotHereError(Exception):
    """A part cannot run on this machine; the message says why."""


@dataclass
class Report:
    """Of one part. status: OK, FAILED or ABSENT. why: of the latter two."""

    part: str
    facts: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    status: str = OK
    why: str = ""
    seconds: float = 0.0

    def check(self, name: str, passed: bool, **facts: Any) -> None:
        """Notes a check. facts: numbers that it stands on."""
        self.checks[name] = bool(passed)
        self.facts.update(facts)

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "part": self.part,
            "status": self.status,
            "why": self.why,
            "seconds": round(self.seconds, 2),
            "checks": self.checks,
            **self.facts,
        }


def run_part(name: str, function: Callable[[Report], None], clock: Callable[[], float]) -> Report:
    """Runs a part; whatever it raises is in its report, and whole on stderr."""
    report, begin = Report(name), clock()
    try:
        function(report)
    except NotHereError as error:
        report.status, report.why = ABSENT, str(error)
    except Exception as error:
        report.status, report.why = FAILED, f"{type(error).__name__}: {error}"
        traceback.print_exc()
    failed = [check for check, passed in report.checks.items() if not passed]
    if failed:
        report.status = FAILED
        report.why = "; ".join([*failed, report.why] if report.why else failed)
    report.seconds = clock() - begin
    return report


def table(reports: Sequence[Report]) -> str:
    """A line for each part."""
    lines = []
    for r in reports:
        passed = f"{sum(r.checks.values())}/{len(r.checks)}"
        lines.append(f"{r.part:<18} {r.status:<9} {passed:>6} {r.seconds:>8.1f} s  {r.why}")
    return "\n".join(lines)
