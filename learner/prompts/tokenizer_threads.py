"""Threads for work on whole conversations: rendering, tokenizing, decoding and parsing.

Such work takes up to 0.2 s for a long conversation. In an event loop, all other episodes and the weight sync would
wait for it. Fast tokenizers release the GIL. They change their state only when padding or truncation changes, and
Slipstream uses neither.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
NUM_THREADS = 4

_threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")


async def in_tokenizer_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in one of the threads. If the caller is canceled, the function may still run to its end."""
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: function(*args, **kwargs))
