"""An AOT graph as a serial Program: one stream, one op per node, views as steps.

    imported = import_graph(gm, name="forward", teams=teams)
    print(imported.program)

Compute nodes become Calls that make their own results; aten view operators become steps of Views
and cost nothing; functional collectives become Collectives into fresh buffers, and `wait_tensor`
vanishes (a serial Program needs no wait). `normalise.py` rewrites what has several spellings to
one, `inplace.py` puts updates of inputs back in place. What cannot be lowered is an
`UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from interlace.frontend.calling.specialise import complete
from interlace.frontend.consent import Consent
from interlace.frontend.importing.collectives import COLLECTIVES
from interlace.frontend.importing.imported import Imported
from interlace.frontend.importing.importer import Importer
from interlace.frontend.importing.normalise import LOWERINGS
from interlace.frontend.importing.rng import RANDOM
from interlace.frontend.teams import Teams


def import_graph(
    gm: fx.GraphModule,
    *,
    name: str = "main",
    teams: Teams | None = None,
    values: Mapping[fx.Node, Any] | None = None,
    labels: Sequence[str] = (),
    static: Collection[int] = (),
    consent: Consent | None = None,
) -> Imported:
    """The serial Program of an AOT graph.

    `values` gives each node's (fake) value; without it they are read from `meta["val"]`, and must
    have concrete sizes. `teams` names the process groups; None takes those of torch.distributed.
    `labels` are the user's names of the arguments, by position, before AOTAutograd. `static` has
    the positions of the graph's arguments that stay at their addresses, such as parameters.
    `consent` asks the other ranks where they must import alike what depends on their sizes.
    """
    lowerings = {**LOWERINGS, **COLLECTIVES, **RANDOM}
    values = complete(gm) if values is None else values
    with unset_fake_temporarily():  # compilers are called in a mode where no tensor is real
        importer = Importer(gm, name, teams or Teams.of_torch(), lowerings, values, labels)
        importer.consent = consent
        return importer.run(static)
