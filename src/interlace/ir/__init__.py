"""The schedule as data: ops, buffers, views, streams, events, teams, Program, and its text.

    sizes.py     sizes that differ from run to run;  size_class.py: which of them a Program is for
    types.py     element types, teams, tables, buffers, rank-dependent integers
    box.py       strided boxes: the bytes that a view is on one rank
    view.py      views: a buffer and the steps that lead to a box of it
    ops.py       one frozen dataclass for each effect
    program.py   Program, its regions, sites and remarks; `instantiate(rank)`
    fields.py    how an op is written, from the fields of its dataclass
    text/        Program to text, and back
    checks/      structural rules, with the offending line: `validate`
    operators.py what an aten operator is: one table for all rooms
    order.py     what orders ops, in a list and between ranks; the order of one op after another
    call_names.py  what a Program calls, and whether it may
    build/       Programs written by hand in Python

Nothing here imports torch.
"""

from interlace.ir.box import Box
from interlace.ir.build import Builder, Handle
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
    names_in,
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

__all__ = [
    "KINDS",
    "VALUE_BITS",
    "Access",
    "Alloc",
    "Arg",
    "AsStrided",
    "Box",
    "Buffer",
    "Builder",
    "Call",
    "Cast",
    "Chunk",
    "Collective",
    "Copy",
    "DType",
    "Dim",
    "Expand",
    "Expect",
    "Free",
    "Fused",
    "FusedKernel",
    "FusedMember",
    "Get",
    "Group",
    "Handle",
    "HostSync",
    "Index",
    "Loc",
    "Meetings",
    "Name",
    "Node",
    "Notify",
    "Op",
    "Others",
    "Permute",
    "Program",
    "Put",
    "RankIndex",
    "Record",
    "Recv",
    "Region",
    "Remark",
    "Reshape",
    "Select",
    "Send",
    "Site",
    "Slice",
    "Spot",
    "Step",
    "Table",
    "TableEntry",
    "Team",
    "View",
    "Wait",
    "Where",
    "bindings",
    "contiguous_strides",
    "in_order",
    "map_views",
    "names_in",
    "parse",
    "parse_set",
    "print_program",
    "print_set",
    "spots",
    "validate",
    "views_in",
]
