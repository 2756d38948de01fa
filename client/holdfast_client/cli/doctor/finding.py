"""What one check has found, and what to mend."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    SKIPPED = "skipped"
    FAILED = "failed"


class Finding(BaseModel):
    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    exit_code: int = 1


def good(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, detail=detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, detail=detail, remedy=remedy)


def skipped(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict=Verdict.SKIPPED, detail=detail)


def failed(check: str, detail: str, remedy: str, exit_code: int) -> Finding:
    return Finding(check=check, verdict=Verdict.FAILED, detail=detail, remedy=remedy, exit_code=exit_code)
