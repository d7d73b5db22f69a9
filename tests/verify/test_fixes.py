"""Every fix that a finding tells is one: applied to the letter, it leaves nothing of the fault."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.verify.literal_fixes import faulty, fixed, single

from interlace.verify import check


def apply_many(seed: int, events: int, signals: int) -> Counter[str]:
    """Applies fixes of single findings until there were so many events and signals among them."""
    rng, met = random.Random(seed), Counter[str]()
    while met["events"] < events or met["signals"] < signals:
        for programs in faulty(rng):
            found = single(programs)
            if found is None:
                continue
            text, finding = found
            met[finding.kind] += 1
            assert finding.fix
            if not finding.edits:
                met[f"{finding.kind} in words"] += 1
                continue
            after = check(fixed(text, finding.fix))
            shown = f"seed {seed}\n{text}\n{finding}\n{after}"
            if finding.kind in ("deadlock", "mismatch"):  # what these keep from running may show
                assert finding.kind not in after.kinds(), shown
            else:
                assert after.sound, shown
            met["signals"] += "notify(" in finding.fix
            met["events"] += "wait(" in finding.fix
            met["frees moved"] += "move line" in finding.fix and "free(" in str(finding)
    return met


@pytest.mark.timeout(400)
def test_fixes_of_single_findings_hold_to_the_letter(seed: int) -> None:
    met = apply_many(seed, 100, 60)
    print(dict(met))
    assert met["race in words"] <= 0.2 * met["race"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_events_and_a_thousand_signals(seed: int) -> None:
    print(dict(apply_many(seed, 2_000, 1_000)))
