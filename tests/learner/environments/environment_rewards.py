"""Reward functions that use environments, as a user writes them."""


def counters(environments, **kwargs):
    return [float(environment.counter) for environment in environments]


async def counters_awaited(environments, **kwargs):
    return [float(environment.counter) for environment in environments]


def counters_if_any(completions, environments=None, **kwargs):
    return [-1.0 for _ in completions] if environments is None else counters(environments)


def counters_logged(environments, log_extra, **kwargs):
    log_extra("counter", [environment.counter for environment in environments])
    return counters(environments)


def takes_anything(completions, **kwargs):
    return [float("environments" in kwargs) for _ in completions]


def is_done(environments, **kwargs):
    return [float(environment.done) for environment in environments]
