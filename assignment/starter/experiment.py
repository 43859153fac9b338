"""Part 4: the interval of a difference that was measured with several seeds.

The handout, assignment/README.md, explains what to run and what to write into
results.json.
"""


def paired_interval(
    first: list[float], second: list[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of first - second, and the low and high end of its interval.

    first[i] and second[i] have the same seed. The interval is Student's, for the mean
    of the differences. You may use scipy.stats.
    """
    raise NotImplementedError("part 4, the paired interval, is not written yet")
