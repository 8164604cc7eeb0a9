"""The arithmetic of draft lengths, by hand."""

from __future__ import annotations

import pytest

from specgraft.bench.probes import best_length


def test_the_best_length_trades_survival_against_the_targets_pass():
    """G = 3: T_step = 10; the pass costs 2, 4, 6 at widths 2, 3, 4, so T_step(1) = 6, T_step(2) = 8."""
    passes = {1: 1.0, 2: 2.0, 3: 4.0, 4: 6.0}
    found = best_length([0.8, 0.7, 0.1], 10.0, passes, plain_ms=4.0)
    assert found["at"] == 2 and found["accept_length"] == pytest.approx(2.5) and found["step_ms"] == 8.0
    assert found["speedup"] == pytest.approx(1.25) and found["draft_tokens"] == 2
    losing = best_length([0.3, 0.1, 0.0], 10.0, passes, plain_ms=4.0)
    assert losing["at"] == 1 and losing["draft_tokens"] == 0 and losing["speedup"] == pytest.approx(1.3 * 4 / 6)
