"""Confidence intervals of shares."""

from statistics import NormalDist


def wilson(share: float, number: float) -> tuple[float, float]:
    """Returns Wilson's 95 % score interval of a share among `number` independent trials, which need not be a whole
    number.

    Source: Wilson 1927, "Probable inference".  Twin: scipy's binomtest(...).proportion_ci(method="wilson"),
    close(1e-12) for whole numbers.
    """
    z = NormalDist().inv_cdf(0.975)
    centre = share + z * z / (2 * number)
    reach = z * (share * (1 - share) / number + z * z / (4 * number * number)) ** 0.5
    low, high = (centre - reach) / (1 + z * z / number), (centre + reach) / (1 + z * z / number)
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding put aside
