"""Tables of tools/experiments.py.

Faults they are there for: a gain in bold that may be 0 or has no interval; a seed without a value that counts.
"""

from __future__ import annotations

import math

import pandas as pd

from tools import experiments


def test_gains_of_seeds_are_in_bold_where_their_intervals_exclude_zero() -> None:
    seeds = [(0.1, 0.4, 0.3, True), (0.2, 0.4, 0.2, True), (0.3, 0.4, 0.1, False)]
    rows = [
        {"": "own", "measure": "exact"} | dict(zip(("before", "after", "gain", "clear"), seed, strict=True))
        for seed in seeds
    ]
    (row,) = experiments.summary_of_gains(pd.DataFrame(rows))
    assert row["before"] == "0.200 +- 0.248" and row["after"] == "0.400 +- 0.000"  # 4.3027 * 0.1 / sqrt(3)
    assert row["each seed"] == "**+0.300**, **+0.200**, +0.100"
    (row,) = experiments.summary_of_gains(pd.DataFrame([rows[0], rows[1] | {"gain": math.nan}]))  # counts nowhere
    assert row["gain"] == "+0.300"
    assert [experiments.is_clear(ends) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (0.0, 0.1))] == [1, 1, 0, 0]
    assert not experiments.is_clear((math.nan, math.nan))
