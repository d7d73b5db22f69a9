"""Random Programs full of sites: all are found, and every strategy keeps their results."""

from __future__ import annotations

import random

import pytest
from tests.passes.random_sites import random_sites
from tests.passes.samples import STRATEGIES
from tests.passes.spellings import as_sample
from tests.passes.test_decompose import assert_overlaps

from interlace.cost import default_machine
from interlace.ir import parse
from interlace.passes import run_pipeline
from interlace.passes.find_sites import Analysis
from interlace.passes.strategies.choose import Chooser

COUNT = 6
FOUND = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_sites_are_found_and_overlapped(strategy: str, seed: int) -> None:
    for number in range(seed, seed + COUNT):
        rng = random.Random(number)
        serial = random_sites(rng, rng.choice((2, 3, 4)), rng.choice((1, 2, 3)))
        sample = as_sample(serial, number)
        found = run_pipeline(serial, "find_sites,place_resharding")
        assert {site.kind for site in found.sites} <= FOUND, f"{number}: {found.sites}"
        mixed = "decompose{strategy=serial}" if rng.random() < 0.5 else "decompose{strategy=ring}"
        some = ",".join(str(s.id) for s in found.sites if rng.random() < 0.7)
        options = f"{STRATEGIES[strategy]},sites=[{some}]"
        made = run_pipeline(found, f"decompose{{{options}}},{mixed}")
        print(number, [site.strategy for site in made.sites])
        assert_overlaps(made, sample, number)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_choice_that_is_shared_is_each_sites_own(device: str, seed: int) -> None:
    """Sites that count as alike would each have been given what the first was given."""
    asked, known = 0, 0
    for number in range(seed, seed + 6):
        rng = random.Random(number)
        text = str(random_sites(rng, rng.choice((2, 4)), 3)).replace("f32", "bf16")
        together = Chooser(default_machine(device), 0)
        for word in rng.sample(("sum", "max", "avg"), 3):
            program = parse(text.replace('reduce="sum"', f'reduce="{word}"'))
            program = run_pipeline(program, "find_sites,place_resharding")
            analysis = Analysis.of(program)
            values = analysis.values
            for found in analysis.found:
                if found.site is not None:
                    alone = Chooser(default_machine(device), 0).choose(values, found.site)
                    assert together.choose(values, found.site) == alone, number
                    asked += 1
        known += len(together.known)
    assert known < asked, "no two sites were alike"
