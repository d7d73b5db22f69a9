"""From PyTorch to Programs: the torch.compile backend, `interlace.compile`, import of FX graphs.

backend.py         torch.compile(model, backend="interlace")
compile.py         interlace.compile(module, *examples): the same without TorchDynamo
compiled_graph.py  a compiled graph, with a bound Program for each signature
caches.py          bounded caches of what is compiled
binding.py         serial Program -> agreed on, overlapped by one choice of all ranks, bound
store.py           schedules and proofs that outlive their process
portable.py        graphs that torch's aot_compile writes and loads
schedules.py       the Programs as files, and files run in place of generated Programs
explain.py         interlace.explain and interlace.report: what became of each site, and why
dynamo.py          TorchDynamo: whose graph it is, what broke it off, guards, lost interrupts
partition.py       what is saved between forward and backward, and what is gathered again
teams.py           process groups as teams; what ranks tell each other while they compile

importing/         an FX graph as a serial Program
calling/           from the arguments of a call to a run
"""

from interlace.frontend.backend import backend
from interlace.frontend.binding import Bound
from interlace.frontend.calling.arguments import Imported, Opaque
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.frontend.importing.importer import import_graph
from interlace.frontend.teams import Teams

__all__ = [
    "Bound",
    "CompiledGraph",
    "Imported",
    "Opaque",
    "Teams",
    "backend",
    "import_graph",
]
