"""Progress in a log: a line every few seconds, none for quick work."""

from firstlight.cli.progress import LineProgress, progress_line

MIB = 1024**2


class Log:
    def __init__(self):
        self.now, self.lines = 0.0, []
        self.progress = LineProgress(self.lines.append, clock=lambda: self.now)

    def at(self, now, done, total=100 * MIB, phase="copy"):
        self.now = now
        self.progress(phase, done * MIB, total, "layer-003")


def test_quick_work_leaves_no_line():
    log = Log()
    for tenth in range(11):
        log.at(tenth / 10, 10 * tenth)
    assert log.lines == []


def test_slow_work_leaves_a_line_every_five_seconds_and_one_at_the_end():
    log = Log()
    for second in range(13):
        log.at(second, 100 * second // 12)
    assert len(log.lines) == 3
    assert log.lines[0].startswith("copy: 41% of 100 MiB, 8.2 MiB/s, ")
    assert log.lines[-1].startswith("copy: 100% of 100 MiB")


def test_phases_are_timed_apart():
    log = Log()
    log.at(0, 0)
    log.at(100, 0, phase="verify")
    log.at(106, 60, phase="verify")
    assert log.lines == ["verify: 60% of 100 MiB, 10 MiB/s, 4.0 s left, layer-003\n"]


def test_a_total_that_is_not_known_is_no_division_by_zero():
    assert progress_line("scan", 0, 0, "x", elapsed=0.0) == "scan: - of 0 B, -, - left, x"
