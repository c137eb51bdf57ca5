from firstlight.schedule.step import TierFlow
from firstlight.schedule.tier_costs import TierCosts


def test_the_quicker_way_follows_what_was_measured() -> None:
    costs = TierCosts()
    assert costs.prefers_fetch(1, {"disk": 10**12}), "nothing was measured"
    costs.learn_step(100, 1.0)
    costs.learn_flows([TierFlow("host", True, 1000, 1.0), TierFlow("host", False, 1000, 1.0)])
    assert costs.prefers_fetch(100, {"host": 900}) and not costs.prefers_fetch(100, {"host": 1100})
    assert costs.prefers_swap(100, 400, "host") and not costs.prefers_swap(100, 600, "host")
    for _ in range(40):
        costs.learn_flows([TierFlow("host", True, 4000, 1.0)])
    assert costs.prefers_fetch(100, {"host": 3900})


def test_short_steps_and_empty_flows_say_nothing() -> None:
    costs = TierCosts()
    costs.learn_step(1, 5.0)
    costs.learn_flows([TierFlow("host", True, 0, 0.0)])
    assert costs.token_seconds is None and costs.rate("host", inward=True) > 0
