"""uPlot in learner/report/uplot/ is the unchanged release that its README names, with its license."""

import hashlib
import re
from pathlib import Path

import learner.report.templates
from learner.report.templates import script

FOLDER = Path(learner.report.templates.__file__).parent / "uplot"
RELEASE = "1.6.32"
SUMS = {  # SHA-256 of the files in https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_the_files_are_those_of_the_release_and_pages_carry_the_license() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*SUMS, "README.md"}
    for name, digest in SUMS.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name
    page = (FOLDER / "README.md").read_text()
    assert RELEASE in page and f"(v{RELEASE})" in (FOLDER / "uPlot.iife.min.js").read_text()
    assert dict(re.findall(r"\| `(\S+)` \| (\w{64}) \|", page)) == SUMS
    assert (FOLDER / "LICENSE").read_text() in script()
    assert "</script" not in script("dashboard.js") and "<!--" not in script("dashboard.js")
