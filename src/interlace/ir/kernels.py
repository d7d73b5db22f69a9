"""The matmul of a Fused op's kernel: read from the op's parts, and refused where they differ.

With W ranks and `rows` rows a rank, the matmul is [W * rows, inner] @ [inner, columns]:

    gather_matmul    the rank's own rows, then those of rank + 1, + 2, ..., in `pieces` ranges each,
                     as they arrive
    scatter_matmul   the rows of rank + 1, + 2, ..., in `pieces` ranges each, into a stage from
                     which they leave; then the rank's own rows, in `own` ranges, into its slot

The pass that makes the op, `validate` and the binder that launches the kernel all ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

from interlace.errors import ProgramError
from interlace.ir.operators import Operator, matmul_of
from interlace.ir.ops import Arg, Call, Expect, Fused, FusedKernel, FusedMember, Record
from interlace.ir.sizes import Int, at_hand
from interlace.ir.types import Buffer, DType, Others, Where
from interlace.ir.view import Box, View

DTYPES = (DType.bf16, DType.f16)
FLOAT8 = (DType.f8e4m3, DType.f8e5m2)
"""Element types of packed rows, which a gather multiplies too."""
TAIL = 128
"""Bytes behind the numbers of a packed row (float8/data.py)."""
ALIGNMENT = 16
"""Bytes that rows of the operands begin at multiples of."""
TILE_ROWS = 128
"""Ranges of a rank's rows are multiples of this."""
LIMIT = 2**31
"""Row and column indices are 32-bit in the kernels."""

MatrixPlace = tuple[str, Box]
"""A box of a buffer."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrices of one matmul."""

    a: View
    b: View
    out: View
    bias: View | None
    packed: bool = False
    """The factors a and b are packed rows of FP8, b transposed."""


@dataclass(frozen=True, slots=True)
class KernelMatmul:
    """The whole matmul of a kernel, on one rank."""

    kernel: FusedKernel
    team: str
    size: int
    rank: int
    rows: Int
    inner: Int
    columns: Int
    dtype: DType
    transposed: bool
    """The weight is the transpose of a row-major matrix."""
    weight: View
    bias: View | None
    own: MatrixPlace
    """The rank's rows alone: what it gathers from, or its slot."""
    others: MatrixPlace
    """All ranks' rows, of which those of other ranks count: where they arrive, or leave from."""
    whole: MatrixPlace
    """All ranks' rows: the result of a gather, what a scatter multiplies."""
    order: tuple[tuple[int, int], ...]
    """For each part, whose rows it makes and which range of them."""
    signal: str = ""
    value: int = 0
    """For a gather: the signal, and its value once all rows of a rank have come; one less for each
    piece that is still to come."""
    packed: tuple[DType, DType] | None = None
    """FP8 types of the two factors, if these are packed rows (`inner` is then their width)."""


def turns(kernel: FusedKernel, size: int) -> list[tuple[int, int]]:
    """For each part in order: how far away the rank is whose rows it makes, and which range.

    >>> turns(FusedKernel(kind="scatter_matmul", pieces=2, own=3), size=3)
    [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1), (0, 2)]
    """
    others = [*product(range(1, size), range(kernel.pieces))]
    if kernel.kind == "gather_matmul":
        return [(0, 0), *others]
    if not kernel.own:
        return [(away, piece) for piece in range(kernel.pieces) for away in (*range(1, size), 0)]
    return [*others, *((0, part) for part in range(kernel.own))]


def own_ranges(kernel: FusedKernel, rows: Int) -> list[tuple[Int, Int]]:
    """Where the parts of a rank's own `rows` begin, and how many each has.

    >>> own_ranges(FusedKernel(kind="scatter_matmul", pieces=2, own=3), 2048)
    [(0, 1024), (1024, 512), (1536, 512)]
    """
    halved = kernel.own > kernel.pieces
    count = kernel.pieces if halved or not kernel.own else kernel.own
    height = rows // count
    ranges = [(i * height, height) for i in range(count)]
    if halved:
        start, half = ranges.pop()[0], height // 2
        ranges += [(start, half), (start + half, half)]
    return ranges


def factors(op: FusedMember) -> Factors | None:
    """The matrices of a call that the kernels compute; None for another op."""
    spec = matmul_of(op.fn) if isinstance(op, Call) else None
    if not isinstance(op, Call) or spec is None or not spec.fusable or op.fn != spec.into:
        return None
    if not legible(op, spec) or len(op.outs) != 1:
        return None
    bias = bias_of(op, spec)
    a, b = op.args[spec.lhs : spec.lhs + 2]
    if isinstance(a, View) and isinstance(b, View) and isinstance(bias, View | None):
        return Factors(a, b, op.outs[0], bias, spec.blocks is not None)
    return None


def legible(op: Call, spec: Operator) -> bool:
    """True if a matmul has the arguments that the kernels know: both factors and a bias; for FP8
    also the blocks of rows and the flag for fast sums."""
    counts = (spec.lhs + 2,) if spec.blocks is None else (spec.blocks + 3, spec.blocks + 4)
    return not op.kwargs and len(op.args) in counts


def bias_of(op: Call, spec: Operator) -> Arg:
    """The bias that a matmul of the kernels adds; None without one."""
    return None if spec.bias is None else op.args[spec.bias]


def ill_scaled(op: Call, gathers: bool, rows: Int, ranks: int = 1) -> str:
    """Why the kernels do not scale as a call of FP8 says, with so many rows for each of `ranks`;
    empty: they do, or it is another call."""
    spec = matmul_of(op.fn)
    if spec is None or spec.blocks is None:
        return ""
    blocks, fast = op.args[spec.blocks], op.args[spec.blocks + 2]
    if not gathers:
        return "no kernel multiplies FP8 before a reduction"
    if not isinstance(blocks, int) or blocks < 1 or ranks % blocks:
        return f"its rows have {blocks or 'their own'} scales, and the kernel takes one a rank"
    if fast is not True:
        return "it asks for sums in fp32, and those of the FP8 kernel stay in the tensor cores"
    if at_hand(rows) % TILE_ROWS or rows % TILE_ROWS:  # other rests need no classes of their own
        return f"the FP8 kernel takes whole tiles of {TILE_ROWS} rows, and a rank has {rows}"
    return ""


def unfit(a: Box, b: Box, out: Box, bias: Box | None, packed: bool = False) -> str:
    """Why the kernels do not multiply such matrices, a @ b (+ bias); empty: they do."""
    if packed and {a.dtype, b.dtype} not in ({DType.f8e4m3}, {*FLOAT8}):
        return f"its factors are {a.dtype} and {b.dtype}, not f8e4m3 or one of them f8e5m2"
    if packed and out.dtype not in DTYPES:
        return f"its result is {out.dtype}, and the kernel makes bf16 or f16"
    if not packed and (a.dtype not in DTYPES or any(box.dtype != a.dtype for box in (b, out))):
        return f"its element type is {a.dtype}, and the kernel takes bf16 or f16"
    (_, inner), (_, columns), multiple = a.sizes, b.sizes, ALIGNMENT // a.dtype.itemsize
    if inner % multiple or columns % multiple:
        return f"its sizes {inner} and {columns} are no multiples of {multiple}"
    if packed and inner <= TAIL:
        return f"its rows of {inner} bytes have no numbers before their scale"
    if not a.contiguous or not out.contiguous:
        return "the rows of its left operand or its result do not lie one after another"
    if not ((b.contiguous and not packed) or _transposed(b).contiguous):
        return "its right operand is neither row-major nor its transpose"
    if bias is not None and bias.sizes != (columns,):
        return "its bias is no row of the result's width"
    if bias is not None and bias.dtype != out.dtype:
        return f"its bias is {bias.dtype}, and its result {out.dtype}"
    if bias is not None and not bias.contiguous:
        return "its bias is not contiguous"
    return ""


def kernel_matmul(
    op: Fused, box: Callable[[View], Box], buffers: Mapping[str, Buffer], where: Where
) -> KernelMatmul:
    """The matmul that an op's kernel computes on a rank; ProgramError where its parts differ."""
    assert op.kernel is not None
    return _Reader(op, op.kernel, box, buffers, where).read()


class _Reader:
    def __init__(
        self,
        op: Fused,
        kernel: FusedKernel,
        box: Callable[[View], Box],
        buffers: Mapping[str, Buffer],
        where: Where,
    ) -> None:
        self.op, self.kernel, self.box, self.buffers, self.where = op, kernel, box, buffers, where
        self.gathers = kernel.kind == "gather_matmul"
        self.products = [self._product(number, part) for number, part in enumerate(op.parts)]
        self.starts: dict[str, tuple[str, Int]] = {}
        """Buffer and first element of each matrix, by its name."""

    def read(self) -> KernelMatmul:
        kernel = self.kernel
        pieces, own = kernel.pieces, kernel.own
        if own not in ((1,) if self.gathers else (0, 1, pieces, pieces + 1)):
            raise ProgramError(f"no kernel makes {pieces} pieces and {own} of the rank's own rows")
        mine, team = self._own()
        member = self.where.member(team)
        size, rank = len(member.ranks), member.index
        order = [((rank + away) % size, piece) for away, piece in turns(kernel, size)]
        if len(order) != len(self.products):
            raise ProgramError(f"it has {len(self.products)} parts, and its kernel {len(order)}")
        rows, inner, columns = self._sizes(mine, size)
        wide, split_wide = (columns, inner) if self.gathers else (inner, columns)
        ranges = own_ranges(kernel, rows)
        for number, (chunk, piece) in enumerate(order):
            made, is_own = self.products[number], chunk == rank
            if (made.b, made.bias) != (mine.b, mine.bias):
                raise ProgramError("its parts multiply by different matrices")
            height = rows // pieces
            first, height = ranges[piece] if is_own else (piece * height, height)
            at = chunk * rows + first if own else (piece * size + chunk) * height
            split, whole = (made.out, made.a)[:: -1 if self.gathers else 1]
            self._matrix("whole", whole, at, (height, wide))
            name, row = ("own", first) if is_own else ("others", at)
            self._matrix(name, split, row, (height, split_wide))
            self._check_members(number, is_own)
        kind, dtype = self.box(mine.a).dtype, self.box(mine.out).dtype
        signal, value = self._signal(team, order)
        return KernelMatmul(
            kernel=kernel,
            team=team,
            size=size,
            rank=rank,
            rows=rows,
            inner=inner,
            columns=columns,
            dtype=dtype,
            transposed=not self.box(mine.b).contiguous,
            weight=mine.b,
            bias=mine.bias,
            own=self._place("own", rows, split_wide, kind),
            others=self._place("others", size * rows, split_wide, kind),
            whole=self._place("whole", size * rows, wide, dtype),
            order=tuple(order),
            signal=signal,
            value=value,
            packed=(kind, self.box(mine.b).dtype) if mine.packed else None,
        )

    def _product(self, number: int, part: tuple[FusedMember, ...]) -> Factors:
        found = [made for member in part if (made := factors(member)) is not None]
        calls = [member for member in part if isinstance(member, Call)]
        if len(found) != 1 or len(calls) != 1:
            raise ProgramError(f"part {number + 1} is no mm, addmm or float8_mm into given memory")
        why = ill_scaled(calls[0], self.gathers, self.box(found[0].a).sizes[0])
        if why:
            raise ProgramError(why)
        return found[0]

    def _own(self) -> tuple[Factors, str]:
        """The matmul of the rank's own rows (the last of them), and the team of its peers."""
        if len(self.products) < 2:
            raise ProgramError("one part computes nothing for, or from, another rank")
        mine = self.products[0 if self.gathers else -1]
        name = (self.products[1].a if self.gathers else mine.out).buffer
        team = self.buffers[name].team
        if team is None:
            raise ProgramError(f"{name!r} is not symmetric: no rank reaches another's rows there")
        return mine, team

    def _sizes(self, mine: Factors, size: int) -> tuple[Int, Int, Int]:
        """Rows a rank, inner size and columns."""
        a, b, out = map(self.box, (mine.a, mine.b, mine.out))
        why = unfit(a, b, out, mine.bias and self.box(mine.bias), mine.packed)
        if why:
            raise ProgramError(why)
        (length, inner), columns = a.sizes, out.sizes[1]
        pieces, own = self.kernel.pieces, self.kernel.own or self.kernel.pieces
        halved = own > pieces
        parts = 2 * pieces if halved else own  # the last part is one of so many
        rows, pieces = length * parts, max(pieces, parts)
        if max(size * rows, inner, columns) >= LIMIT:
            raise ProgramError(f"an extent of {LIMIT} or more")
        if pieces > 1 and (rows % pieces or rows // pieces % TILE_ROWS):
            what = "half ranges" if halved else "ranges"
            raise ProgramError(
                f"its kernel makes {what} of whole tiles of {TILE_ROWS} rows, and not {pieces} of "
                f"{rows}"
            )
        return rows, inner, columns

    def _matrix(self, name: str, view: View, row: Int, sizes: tuple[Int, Int]) -> None:
        """A view is these rows of a matrix, whose others other parts have."""
        box = self.box(view)
        start = view.buffer, box.offset - row * sizes[1]
        alike = self.starts.setdefault(name, start) == start
        if not alike or (box.sizes, box.strides) != (sizes, (sizes[1], 1)):
            raise ProgramError(f"its parts have not the rows of one matrix in {view.buffer!r}")

    def _place(self, name: str, rows: Int, width: Int, dtype: DType) -> MatrixPlace:
        buffer, start = self.starts[name]
        _, held = self.box(View(buffer)).hull
        if start < 0 or (start + rows * width) * dtype.itemsize > held:
            raise ProgramError(f"{buffer!r} does not hold the rows of all ranks")
        return buffer, Box(start, (rows, width), (width, 1), dtype)

    def _check_members(self, number: int, own: bool) -> None:
        """Beside its matmul, a part waits for its rows (gather) or records them (scatter)."""
        part = self.op.parts[number]
        if self.gathers:
            fits = len(part) == 1 if own else len(part) == 2 and isinstance(part[0], Expect)
        else:
            records = not own or self.kernel.own != 1 or self.kernel.pieces == 1
            fits = all(isinstance(member, Record) and records for member in part[1:])
        if not fits:
            raise ProgramError(f"part {number + 1} waits or tells where the kernel does not")

    def _signal(self, team: str, order: list[tuple[int, int]]) -> tuple[str, int]:
        """The one signal that a gather awaits from each of the others, and its last value."""
        if not self.gathers:
            return "", 0
        expects = [m for part in self.op.parts for m in part if isinstance(m, Expect)]
        found = set[tuple[str, str, int]]()
        for expect, (chunk, piece) in zip(expects, order[1:], strict=True):
            if isinstance(expect.peer, Others) or self.where.index(expect.peer) != chunk:
                raise ProgramError("a part awaits another rank than that whose rows it takes")
            found.add((expect.team, expect.signal, expect.value - piece))
        ((owner, signal, first), *more) = found
        if more or owner != team:
            raise ProgramError("its parts await different signals, or values that do not rise by 1")
        return signal, first + self.kernel.pieces - 1


def _transposed(box: Box) -> Box:
    return Box(box.offset, box.sizes[::-1], box.strides[::-1], box.dtype)
