"""The schedule as data: ops, buffers, views, streams, events, teams, Program, and its text.

    sizes.py      sizes that differ from run to run, and which of them a Program is for
    types.py      element types, teams, tables, buffers, rank-dependent integers
    view.py       views: a buffer and the steps that lead to a box of it; boxes of bytes
    operators.py  operators of PyTorch: what each is and does, which a schedule may call
    ops.py        one frozen dataclass for each effect
    roles.py      the fields of ops: how each is written, read, checked and built
    program.py    Program, its regions, sites and remarks; `instantiate(rank)`
    lifetimes.py  whose stream a buffer is, and when a run lets go of it
    overlap.py    which bytes two views share, on some rank
    order.py      what orders ops, in a list and between ranks; the order of one op after another
    text/         Program to text, and back
    kernels.py    the matmul of a fused op's kernel, read from the op's parts
    validate.py   structural rules, with the offending line
    build.py      Programs written in Python

Nothing here imports torch.
"""

# pyright: reportUnusedImport=false
from interlace.ir.ops import (
    KINDS,
    Access,
    Alloc,
    Arg,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    FusedKernel,
    FusedMember,
    Get,
    Group,
    HostSync,
    Loc,
    Name,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
    views_in,
)
from interlace.ir.order import Meetings, bindings, in_order
from interlace.ir.program import (
    Node,
    Program,
    Region,
    Remark,
    Site,
    Spot,
    map_views,
    spots,
)
from interlace.ir.text.parser import parse, parse_set
from interlace.ir.text.printer import print_program, print_set
from interlace.ir.types import (
    VALUE_BITS,
    Buffer,
    Dim,
    DType,
    Index,
    Others,
    RankIndex,
    Table,
    TableEntry,
    Team,
    Where,
    contiguous_strides,
)
from interlace.ir.validate import validate
from interlace.ir.view import (
    AsStrided,
    Box,
    Cast,
    Chunk,
    Expand,
    Permute,
    Reshape,
    Select,
    Slice,
    Step,
    View,
)
