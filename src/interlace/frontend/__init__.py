"""From PyTorch to Programs: the torch.compile backend, `interlace.compile`, import of FX graphs.

backend.py       torch.compile(model, backend="interlace")
compile.py       interlace.compile(fn, *examples): the same without TorchDynamo
capture.py       the Programs behind a compiled model;  explain.py: what became of each site
artefact.py      a compiled graph, with a bound Program for each signature
binding.py       serial Program -> overlapped, agreed on, bound
partition.py     what is saved between forward and backward, and what is gathered again
checkpoints.py   the user's own checkpointing
consent.py       ranks decide alike on what depends on their own sizes
teams.py         process groups as teams (membership.py: ranks tell each other theirs)

importing/       an FX graph as a serial Program
calling/         from the arguments of a call to a run
"""

from interlace.frontend.artefact import Artefact
from interlace.frontend.backend import backend
from interlace.frontend.binding import Bound
from interlace.frontend.capture import Captured, capture
from interlace.frontend.importing.import_fx import import_graph
from interlace.frontend.importing.imported import Imported, Opaque
from interlace.frontend.teams import Teams

__all__ = [
    "Artefact",
    "Bound",
    "Captured",
    "Imported",
    "Opaque",
    "Teams",
    "backend",
    "capture",
    "import_graph",
]
