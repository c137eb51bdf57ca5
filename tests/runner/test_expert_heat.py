"""Experts by heat: those used often stay, those not used cool down, slots are never lost."""

from hypothesis import given
from hypothesis import strategies as st

from firstlight.runner.expert_heat import Heat, SlotTable


def test_the_hot_ones_stay_and_the_coldest_makes_room() -> None:
    heat = Heat()
    table: SlotTable[str] = SlotTable(3, heat)
    for _ in range(5):
        heat.use(["hot", "warm"])
        heat.next_step()
    heat.use(["hot", "cold"])
    heat.next_step()
    table.place(["hot", "warm", "cold"])
    slot = table.slot_of("cold")
    assert table.place(["new"]) == [slot]
    assert table.slot_of("hot") >= 0 and table.slot_of("warm") >= 0 > table.slot_of("cold")


def test_what_was_hot_long_ago_is_colder_than_what_is_used_now() -> None:
    heat = Heat(half_life_steps=4)
    heat.use(["old"] * 6)
    heat.next_step()
    for _ in range(20):
        heat.next_step()
    heat.use(["fresh"])
    heat.next_step()
    assert heat.of("fresh") > heat.of("old") > 0


def test_heats_compare_the_same_when_numbers_get_large() -> None:
    heat = Heat(half_life_steps=1)
    for _ in range(1000):
        heat.use(["often"])
        heat.next_step()
    heat.use(["often", "once"])
    heat.next_step()
    assert heat.of("often") > heat.of("once") > heat.of("never") == 0


def test_host_memory_lets_in_only_what_is_hotter() -> None:
    heat = Heat()
    table: SlotTable[str] = SlotTable(1, heat)
    heat.use(["a", "a", "b"])
    heat.next_step()
    assert table.admit("a") == 0 and table.admit("b") == -1
    heat.use(["b", "b"])
    heat.next_step()
    assert table.admit("b", locked=["a"]) == -1 and table.admit("b") == 0


def test_what_is_needed_in_turns_does_not_drive_itself_out() -> None:
    """Eight keys over four slots: a half is found each time, not the none of least recent use."""
    heat = Heat()
    table: SlotTable[int] = SlotTable(4, heat)
    hits = 0
    for _ in range(20):
        for key in range(8):
            heat.use([key])
            hits += table.slot_of(key) >= 0
            table.place(table.absent([key]), locked=[key])
        heat.next_step()
    assert hits >= 19 * 3


@given(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=4), max_size=30))
def test_every_key_that_is_placed_has_its_own_slot(steps: list[set[int]]) -> None:
    heat = Heat()
    table: SlotTable[int] = SlotTable(4, heat)
    for keys in steps:
        heat.use(keys)
        table.place(table.absent(sorted(keys)), locked=keys)
        slots = [table.slot_of(key) for key in keys]
        assert min(slots) >= 0 and len(set(slots)) == len(slots)
        table.check_integrity()
        heat.next_step()
