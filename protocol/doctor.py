"""What the doctors of both sides share: a finding, how findings are told, and what a machine can say of itself.

A doctor looks before a run begins, changes nothing, and says of each problem in one line what to do about it.
"""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from protocol.hardware import Dtype, dtype_choice
from protocol.installation import DISTRIBUTION

GIB = 1 << 30
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Of one subject. Example: port, "nothing listens at tcp://node7:5757", remedy "start the server there"."""

    subject: str
    verdict: Literal["ok", "problem", "unknown"]
    text: str
    remedy: str = ""
    """Of a problem."""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.subject:10} {self.text}{f'; {self.remedy}' if self.remedy else ''}"


def ok(subject: str, text: str) -> Finding:
    return Finding(subject=subject, verdict="ok", text=text)


def problem(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject=subject, verdict="problem", text=text, remedy=remedy)


def problem_of(subject: str, error: Exception, otherwise: str) -> Finding:
    """An error as a finding. Its remedy is what stands after its first semicolon or sentence, or else `otherwise`."""
    text = in_one_line(str(error))
    for mark in ("; ", ". "):
        said, found, remedy = text.partition(mark)
        if found:
            return problem(subject, said, remedy.removesuffix("."))
    return problem(subject, text, otherwise)


def unknown(subject: str, text: str) -> Finding:
    """What could not be looked at, which may be no problem."""
    return Finding(subject=subject, verdict="unknown", text=text)


def tell(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print each as it is found, or all as one JSON array; return the exit status, 1 with any problem."""
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
    """Of Slipstream; "unknown" where it runs from sources that were never installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def free_memory_bytes() -> int | None:
    """What this process may still take: of the machine's memory, or of its container's if that is less. None off Linux."""
    free, limit = _of_meminfo("MemAvailable:"), _of_cgroup("memory.max")
    if free is None or limit is None:
        return free
    return min(free, limit - (_of_cgroup("memory.current") or 0))


def total_memory_bytes() -> int | None:
    """All that this process could ever take: of the machine's memory, or of its container's if less. None off Linux."""
    total, limit = _of_meminfo("MemTotal:"), _of_cgroup("memory.max")
    return total if total is None or limit is None else min(total, limit)


def _of_meminfo(field: str) -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _of_cgroup(name: str) -> int | None:
    """None without a container, without cgroups of version 2, or without a limit."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def of_dtype(dtype: Dtype) -> Finding:
    """Report whether this machine computes fastest in `dtype`, and why."""
    fastest, reason = dtype_choice()
    if dtype == fastest:
        return ok("speed", f"dtype = {dtype}: {reason}")
    return unknown("speed", f"dtype = {dtype} may be slower here than {fastest}: {reason}")


def of_memory(where: str, needed: int, free: int | None, remedy: str) -> Finding:
    """Compare, with numbers, what is needed with what is free."""
    if free is None:
        return unknown("memory", f"{where} needs about {_gib(needed)}; what is free is not known here")
    text = f"{where} needs about {_gib(needed)}, {_gib(free)} are free"
    return ok("memory", text) if needed <= free else problem("memory", text, remedy)


def of_disk(path: Path, what: str, needed: int) -> Finding:
    """Whether `path` can be written, and has room; it need not exist yet."""
    place = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return problem(
            "disk", f"{place} cannot be written, where {what} goes", f"chown it, or choose another for {what}"
        )
    free = shutil.disk_usage(place).free
    text = f"{what} needs about {_gib(needed)} in {place}, {_gib(free)} are free"
    return ok("disk", text) if needed <= free else problem("disk", text, f"free some, or choose another for {what}")


def in_one_line(text: str) -> str:
    """Also what a peer has said, which may hold anything."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
