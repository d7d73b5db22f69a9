"""From PyTorch to Programs: the torch.compile backend, `interlace.compile`, import of FX graphs.

backend.py        torch.compile(model, backend="interlace")
compile.py        interlace.compile(fn, *examples): the same without TorchDynamo
capture.py        the Programs behind a compiled model
artefact.py       a compiled graph, with a bound Program for each signature
binding.py        serial Program -> overlapped, agreed on, bound
specialise.py     symbolic graphs made concrete
partition.py      what is saved between forward and backward, and what is gathered again
grouped.py        grouped matmuls of equal groups as batches of matmuls
consent.py        ranks decide alike on what depends on their own sizes
import_fx.py      an AOT graph as a serial Program (importer.py walks, emitter.py writes)
normalise.py      one spelling for what torch writes in several
functional.py     collectives that write into a tensor made functional while tracing
collectives.py    functional collectives
inplace.py        updates of inputs put back in place
rng.py            random numbers that backward draws again
waiting.py        arguments that a caller's collective has not filled yet
sizes.py          DTensors of other sizes that TorchDynamo does not see
teams.py          process groups as teams (membership.py: ranks tell each other theirs)
views.py, types.py, graphs.py, locs.py: what these stand on
"""

from interlace.frontend.artefact import Artefact
from interlace.frontend.backend import backend
from interlace.frontend.binding import Bound
from interlace.frontend.capture import Captured, capture
from interlace.frontend.import_fx import import_graph
from interlace.frontend.imported import Imported, Opaque
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
