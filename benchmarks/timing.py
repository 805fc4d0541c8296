"""Fair timing: contenders take turns, so that a drift of the machine meets all of them alike."""

import statistics
import time
from collections.abc import Callable


def alternate(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of each contender, after one round that is not counted.

    A contender must not return before its work is done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: list[float]) -> float:
    return statistics.median(values)
