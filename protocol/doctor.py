"""Shared parts of both sides' doctors: findings, their output and machine facts.

A doctor inspects before a run starts, changes nothing, and names a remedy in one line for each problem.
"""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from protocol.hardware import Dtype, dtype_choice
from protocol.installation import DISTRIBUTION

GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check.

    Example: subject port, text "nothing listens at tcp://node7:5757", remedy "start the server there".
    """

    subject: str
    verdict: Literal["ok", "problem", "unknown"]
    text: str
    remedy: str = ""
    """Remedy of a problem."""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.subject:10} {self.text}{f'; {self.remedy}' if self.remedy else ''}"


def ok(subject: str, text: str) -> Finding:
    return Finding(subject=subject, verdict="ok", text=text)


def problem(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject=subject, verdict="problem", text=text, remedy=remedy)


def problem_of(subject: str, error: Exception, otherwise: str) -> Finding:
    """Return an error as a problem.

    The remedy is the text after its first semicolon or sentence, or else `otherwise`.
    """
    text = in_one_line(str(error))
    for mark in ("; ", ". "):
        fact, found, remedy = text.partition(mark)
        if found:
            return problem(subject, fact, remedy.removesuffix("."))
    return problem(subject, text, otherwise)


def unknown(subject: str, text: str) -> Finding:
    """Return a finding about what cannot be checked, and may be no problem."""
    return Finding(subject=subject, verdict="unknown", text=text)


def print_findings(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print the findings, and return the exit status: 1 with any problem, else 0.

    Each finding is printed as it is found. With `as_json`, all are printed as one JSON array.
    """
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(msgspec.json.encode(found).decode())
    num_problems = sum(finding.verdict == "problem" for finding in found)
    if num_problems:
        print(f"{num_problems} problem{'s' if num_problems > 1 else ''} found", file=sys.stderr)
    return 1 if num_problems else 0


def package_version() -> str:
    """Return the version of Slipstream, or "unknown" if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def free_memory_bytes() -> int:
    """Return the bytes that this process may still allocate on the machine, or in the container if that is less."""
    free, limit = psutil.virtual_memory().available, _of_cgroup("memory.max")
    if limit is None:
        return free
    return min(free, limit - (_of_cgroup("memory.current") or 0) + _reclaimable_bytes())


def total_memory_bytes() -> int:
    """Return the bytes that this process could ever allocate on the machine, or in the container if that is less."""
    total, limit = psutil.virtual_memory().total, _of_cgroup("memory.max")
    return total if limit is None else min(total, limit)


def _of_cgroup(name: str) -> int | None:
    """Return a value, or None without a container, cgroups of version 2, or a limit."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _reclaimable_bytes() -> int:
    """Return the part of the container's memory that the kernel frees on demand, above all the page cache."""
    try:
        lines = (CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(value) for name, value in map(str.split, lines) if name in RECLAIMABLE)


def dtype_finding(dtype: Dtype) -> Finding:
    """Report whether this machine computes fastest in `dtype`, and why."""
    fastest, reason = dtype_choice()
    if dtype == fastest:
        return ok("speed", f"dtype = {dtype}: {reason}")
    return unknown("speed", f"dtype = {dtype} may be slower here than {fastest}: {reason}")


def memory_finding(where: str, needed: int, free: int, remedy: str) -> Finding:
    """Compare the memory that is needed with the memory that is free."""
    text = f"{where} needs about {_gib(needed)}, {_gib(free)} are free"
    return ok("memory", text) if needed <= free else problem("memory", text, remedy)


def disk_finding(path: Path, what: str, needed: int | None) -> Finding:
    """Report whether `path` is writable and has room for `needed` bytes (None: unknown). It need not exist yet."""
    folder = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not os.access(folder, os.W_OK):
        return problem(
            "disk",
            f"{folder} is not writable for {what}",
            f"chown it, or choose another directory for {what}",
        )
    free = shutil.disk_usage(folder).free
    if needed is None:
        return unknown("disk", f"the size of {what} is unknown; {_gib(free)} are free in {folder}")
    text = f"{what} needs about {_gib(needed)} in {folder}, {_gib(free)} are free"
    return (
        ok("disk", text)
        if needed <= free
        else problem("disk", text, f"free disk space, or choose another directory for {what}")
    )


def in_one_line(text: str) -> str:
    """Return a text on one line, without unprintable characters.

    The text may come from a peer and hold anything.
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
