"""The heap of an engine's process: the free pages in the middle of it go back to the system.

On a CPU every batch size has matrix products of its own in oneDNN's caches, 260 KiB each, and activations of its own. Both come
and go, and glibc keeps the holes between them: in its first five minutes the demo's engine grew by 56 MiB, with 213 MiB of
its heap in use all the time. With the holes given back, what is resident is what is in use.
"""

import ctypes
import threading
import time

TRIMMER = "heap-trim"
LIBC = ctypes.CDLL(None)
INTERVAL_S = 5.0
"""A trim takes 10 ms, and what is used again costs page faults: together 1 % of the engine's CPU time. (MALLOC_MMAP_THRESHOLD_
at 128 KiB keeps the heap as small, for 8 %; at 1 MiB it still grows.)"""


def keep_trimmed() -> None:
    """Trim the heap again and again, in a thread, for as long as this process lives."""
    threading.Thread(target=_trim_again_and_again, name=TRIMMER, daemon=True).start()


def _trim_again_and_again() -> None:
    while True:
        time.sleep(INTERVAL_S)
        trim()


def trim() -> None:
    """Give all whole free pages back; meanwhile other threads that allocate wait."""
    LIBC.malloc_trim(0)
