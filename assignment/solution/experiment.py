"""The reference of starter/experiment.py."""

from scipy import stats


def paired_interval(
    first: list[float], second: list[float], level: float = 0.95
) -> tuple[float, float, float]:
    differences = [one - other for one, other in zip(first, second, strict=True)]
    mean = sum(differences) / len(differences)
    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(level)
    return mean, float(interval.low), float(interval.high)
