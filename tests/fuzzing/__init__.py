"""Random sets of Programs, checked by `check` and by the exhaustive oracle: do the two agree?

    tally = run(Plan(programs=10_000, seed=7))
    assert not tally.misses, tally.found[0].text

draw.py       draws one SPMD Program;  collectives.py: its collectives;  wide.py: more of everything
sets.py       sets of Programs, one of whose ranks may be mutilated
compare.py    holds a report against a verdict;  shrink.py: makes what disagrees small
campaign.py   many of them, in several processes;  __main__.py: without the libraries of a terminal
"""

from tests.fuzzing.campaign import Found, Plan, Tally, run
from tests.fuzzing.compare import Comparison, Disagreement, compare
from tests.fuzzing.sets import drawn

__all__ = [
    "Comparison",
    "Disagreement",
    "Found",
    "Plan",
    "Tally",
    "compare",
    "drawn",
    "run",
]
