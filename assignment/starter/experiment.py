"""Part 4: the interval of a difference that was measured with several seeds.

The handout, assignment/README.md, says what to run, and what stands in results.json.
"""


def paired_interval(
    first: list[float], second: list[float], level: float = 0.95
) -> tuple[float, float, float]:
    """The mean of first - second, seed by seed, and its interval.

    Returns difference, low, high. first[i] and second[i] are of the same seed. The
    interval is Student's, of the mean of the differences; scipy.stats may be used.
    """
    raise NotImplementedError("part 4, the paired interval, is not written yet")
