"""The benchmark of scaling: the fit of a slope, its interval and verdict, and attention that is measured apart."""

import pytest

from cacheprobe_benchmarks.speed import scaling


@pytest.mark.parametrize(("power", "is_linear"), [(0.5, True), (1.0, True), (1.04, True), (1.06, False), (2.0, False)])
def test_a_power_law_has_its_slope(power: float, is_linear: bool) -> None:
    fit = scaling._fit({size: [3 * size**power] * 3 for size in (1, 2, 4, 8, 16)})
    assert fit["slope"] == pytest.approx(power, abs=1e-3) and fit["is_linear"] is is_linear
    assert fit["interval"] == [fit["slope"]] * 2


def test_fixed_costs_do_not_hide_a_growth() -> None:
    """A cost of 100 beside size^2: over all sizes the slope would be below 1."""
    fit = scaling._fit({size: [100 + size**2] for size in (1, 2, 4, 8, 16, 32, 64)})
    assert fit["fitted_to"] == [8, 16, 32, 64] and not fit["is_linear"]


def test_the_interval_holds_the_noise_of_the_rounds() -> None:
    """Slope 1 with rounds that differ by a tenth; by hand: 3 sizes x 3 rounds leave 7 degrees of freedom."""
    quiet = scaling._fit({size: [size * f for f in (0.99, 1, 1.01)] for size in (1, 2, 4)})
    noisy = scaling._fit({size: [size * f for f in (0.9, 1, 1.1)] for size in (1, 2, 4)})
    widths = [fit["interval"][1] - fit["interval"][0] for fit in (quiet, noisy)]
    assert quiet["slope"] == noisy["slope"] == 1 and widths[1] == pytest.approx(10 * widths[0], rel=0.1)
    # errors ln .9 = -.10536 and ln 1.1 = .09531; residual deviation sqrt(3 x (.01110 + .00908) / 7) = .09301;
    # x = 0, ln 2, ln 4, three times each: sum of squares 6 x ln(2)^2 = 2.8827
    assert widths[1] == pytest.approx(2 * 2.36 * 0.09301 / 2.8827**0.5, rel=0.01)


def test_attention_alone_is_quadratic_in_the_prompt() -> None:
    """It counts numbers instead of seconds: every pass attends to the slots in use and to no more."""
    attended: list[int] = []
    real = scaling.attend_over_cache

    def counting(cache, layer, q, *rest):
        attended.append(q.shape[2] * cache.span)
        return real(cache, layer, q, *rest)

    model = scaling._model(scaling.TINY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scaling, "attend_over_cache", counting)
        assert scaling._attention_seconds(model, 256, 64) > 0
    assert attended == [64 * span for span in (64, 128, 192, 256) for _ in range(model.n_layers)]
