"""Progress bars of bounded work: warm start, large pushes, evaluations."""

import sys

PROGRESS_EVERY_S = 1.0 if sys.stderr.isatty() else 10.0
"""Between two drawings of a progress bar, each of which is a line in a file."""
