"""The timeline of a start: phases in order, inside the time they took, readable while they run."""

import threading
import time

import pytest

from firstlight.engine.timeline import Timeline


def test_phases_keep_their_order_and_their_parents() -> None:
    timeline = Timeline(started=100.0)
    timeline.begin("load", 101.0)
    timeline.begin("load", 101.5, parent="rank 0")
    timeline.end("load", 103.0, parent="rank 0")
    timeline.end("load", 104.0)
    found = [(p.parent, p.name, p.began, p.ended) for p in timeline.phases()]
    assert found == [("", "load", 1.0, 4.0), ("rank 0", "load", 1.5, 3.0)]


def test_a_running_phase_has_no_end_and_shows_its_progress() -> None:
    timeline = Timeline(started=0.0)
    timeline.begin("load", 1.0)
    timeline.detail("load", "1 of 2")
    timeline.detail("load", "2 of 2")
    (phase,) = timeline.phases()
    assert phase.ended is None and phase.detail == "2 of 2" and phase.began == 1.0
    timeline.end("load", 2.0)
    assert timeline.phases()[0].detail == "2 of 2"


def test_clocks_that_disagree_never_give_negative_times() -> None:
    timeline = Timeline(started=100.0)
    timeline.begin("import", 99.0)
    timeline.end("import", 98.0)
    (phase,) = timeline.phases()
    assert phase.began == phase.ended == 0.0


def test_news_of_a_phase_that_never_began_is_dropped() -> None:
    timeline = Timeline(started=0.0)
    timeline.detail("load", "1 of 2")
    timeline.end("load", 1.0)
    assert timeline.phases() == []


def test_a_block_that_fails_leaves_its_phase_running() -> None:
    """The report of a failed start shows where it ended."""
    timeline = Timeline(started=time.time())
    with pytest.raises(RuntimeError), timeline.phase("load", "detail"):
        raise RuntimeError
    with timeline.phase("next"):
        pass
    assert [p.ended is None for p in timeline.phases()] == [True, False]


def test_it_is_read_while_others_write() -> None:
    timeline = Timeline(started=0.0)

    def write(rank: int) -> None:
        for i in range(200):
            timeline.begin(f"phase {i}", i, parent=f"rank {rank}")
            timeline.end(f"phase {i}", i + 1, parent=f"rank {rank}")

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        timeline.phases()
    assert len(timeline.phases()) == 800 and all(p.ended == p.began + 1 for p in timeline.phases())
