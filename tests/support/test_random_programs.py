"""The generator's promise: in list order, its `in_order` Programs come to their end."""

from __future__ import annotations

import random

from tests.support.random_programs import random_program

from interlace.verify import check


def test_in_order_programs_do_not_deadlock(seed: int) -> None:
    rng = random.Random(seed)
    stuck = 0
    for _ in range(40):
        program = random_program(rng, in_order=True, max_streams=1, num_ops=20)
        kinds = {finding.kind for finding in check(program).findings}
        assert "deadlock" not in kinds, str(program)
        loose = random_program(rng, max_streams=1, num_ops=20, team_size=3)
        stuck += "deadlock" in {finding.kind for finding in check(loose).findings}
    assert stuck, "without it some do, so the check would have said so"
