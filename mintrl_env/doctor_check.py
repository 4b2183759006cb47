"""What a check of the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """OK: works. WARN: something optional is missing. FAIL: what was installed for cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        group: the heading that it belongs under.
        name: what was looked at.
        status: see `Status`.
        detail: what was found.
        fix: what to do about it, a command where there is one; "" where nothing is to be done.
    """

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""
