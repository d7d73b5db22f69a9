"""From PyTorch to Programs: the torch.compile backend, and the import of FX graphs.

import_fx.py      an AOT graph as a serial Program (importer.py walks, emitter.py writes)
normalise.py      one spelling for what torch writes in several
collectives.py    functional collectives
inplace.py        updates of inputs put back in place
rng.py            random numbers that backward draws again
teams.py          process groups as teams
"""

from interlace.frontend.import_fx import import_graph
from interlace.frontend.importer import Imported, Opaque
from interlace.frontend.teams import Teams

__all__ = ["Imported", "Opaque", "Teams", "import_graph"]
