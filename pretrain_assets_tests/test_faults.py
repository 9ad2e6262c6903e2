"""A short fault campaign: ten kills in one life of a table, with one and with two workers in turn."""

from __future__ import annotations

import pytest

from benchmarks.faults import QUICK, campaign, report

KILLS = 10


@pytest.mark.slow
def test_no_kill_loses_a_row_or_a_version_or_leaves_a_file_behind() -> None:
    found, undisturbed = campaign(KILLS, seed=3, workers=[1, 2], scale=QUICK)
    assert found.notes == []
    assert (found.kills, found.kills_survived, found.lives_equal) == (KILLS, KILLS, found.lives)
    assert set(found.kills_by_workers) == {"1", "2"}
    assert all(report(found, undisturbed, seed=3, workers=[1, 2]).met.values())
