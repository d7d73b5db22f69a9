"""A mixture of experts that drops no token: rows travel to their experts and back, by chunks.

    mixture = DroplessExperts([up_and_down(4), up_and_down(4)], num_experts=16, group=mesh["ep"])
    y = mixture(x, expert)        # y[i] is x[i] through expert[i], on whatever rank that is

Each of the 2 ranks has two chunks of 4 experts. Sizes are fixed, counts are data: a rank makes room
for `max_rows` rows of each chunk, and how many come is read from tensors as they travel. So one
Program serves all steps. Under `backend="interlace"` the rows of one chunk travel while the
experts of another compute, forward and backward, and the proof holds for all counts.

    counts                 [chunks, ranks, experts]: rows that go to each expert of each rank
    exchange of counts     what comes from each rank
    chunk by chunk         rows to their ranks > by expert > experts > by rank > back
    places                 each row where it was

Nothing is summed, and rows beyond the counts are zero: the bits are those of eager.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from interlace.comm.collectives import Counts
from interlace.errors import GroupError, InputError, PeerError
from interlace.nn.groups import GroupLike, group_of, size_of
from interlace.torch_private import resolve_process_group
from interlace.torch_private.distributed import functional


class DroplessExperts(nn.Module):
    """Experts of all ranks of a group, each on one rank: every row goes to its expert and back.

    Expert e is on rank `e // (num_experts // ranks)`; there the chunks have as many each, in order.

    Args:
        experts: the modules of this rank's chunks, each called as `module(rows, sizes)`. The rows
            [max_rows, dim] are sorted by expert, `sizes` (i64) says how many each expert of the
            chunk has; further rows are zero, and what becomes of them is dropped. `GroupedLinear`
            takes both as they come.
        num_experts: the experts of all ranks.
        group: the ranks: a process group, or a mesh of one dimension. None: this rank alone.
        max_rows: the most rows that a rank may get for one chunk from all ranks. More are an error
            on all of them. None: as many as can come, the tokens of all ranks.

    Raises:
        GroupError: the experts do not divide among the ranks and chunks.

    Examples:
        >>> class Expert(torch.nn.Linear):  # alone in its chunk, it needs no sizes
        ...     def forward(self, rows, sizes):
        ...         return super().forward(rows)
        >>> chunks = [Expert(32, 32) for _ in range(2)]  # on each of two ranks
        >>> mixture = DroplessExperts(chunks, num_experts=4, group=mesh)
        >>> mixture(torch.randn(16, 32), torch.randint(4, (16,))).shape
        torch.Size([16, 32])
    """

    def __init__(
        self,
        experts: Iterable[nn.Module],
        num_experts: int,
        group: GroupLike = None,
        max_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(experts)
        found = group_of(group)
        self.ranks, self.max_rows = 1 if found is None else size_of(found), max_rows
        self.group_name = "" if found is None else found.group_name
        count = self.ranks * len(self.chunks)
        if not count or num_experts < 1 or num_experts % count:
            raise GroupError(
                f"{num_experts} experts do not divide among {self.ranks} ranks with "
                f"{len(self.chunks)} chunks each: give a multiple of {max(count, 1)}"
            )
        self.experts_per_chunk = num_experts // count

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        """The rows through their experts, in the order of x.

        Args:
            x: [tokens, dim]; ranks may have different numbers of tokens if `max_rows` is given.
            expert: i64 [tokens], the expert of each, from 0 to `num_experts` - 1.
        """
        ranks, chunks, each = self.ranks, len(self.chunks), self.experts_per_chunk
        tokens = x.shape[0]
        room = ranks * tokens if self.max_rows is None or ranks == 1 else self.max_rows
        chunk = expert // each % chunks
        block = (chunk * ranks + expert // (chunks * each)) * each + expert % each
        known = (expert >= 0) & (expert < chunks * ranks * each)
        block = torch.where(known, block, -1)  # which scatter_add refuses
        counts = torch.zeros(chunks * ranks * each, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, block, torch.ones_like(block)).view(chunks, ranks, each)
        came = self._counts_of_peers(counts)

        at = torch.arange(tokens, device=x.device)
        order = torch.sort(block, stable=True).indices
        of_chunk = counts.sum((1, 2))
        first = of_chunk.cumsum(0) - of_chunk
        orders = order[(first.unsqueeze(1) + at) % tokens].flatten()  # a chunk's own rows first
        places = torch.zeros_like(order).scatter(0, order, at) - first[chunk] + chunk * tokens

        done: list[Tensor] = []
        rows_of = SelectRows.apply(x, orders, places).view(chunks, *x.shape).unbind()
        for number, (rows, experts) in enumerate(zip(rows_of, self.chunks, strict=True)):
            sent, received = counts[number].sum(1), came[number].sum(1)
            rows = self._exchange(rows, sent, received, room)
            if each > 1 and ranks > 1:
                source, target = by_expert(came[number], room)
                rows = SelectRows.apply(rows, source, target)
            y = experts(rows, came[number].sum(0))
            if each > 1 and ranks > 1:
                y = SelectRows.apply(y, target, source)
            done.append(self._exchange(y, received, sent, tokens))
        return SelectRows.apply(torch.cat(done), places, orders)

    def _counts_of_peers(self, counts: Tensor) -> Tensor:
        """The rows that come from each rank for each expert of this one, [chunks, ranks, each]."""
        if self.ranks == 1:
            return counts
        ops, sent = functional, counts.transpose(0, 1).contiguous()
        splits = [1] * self.ranks
        came = ops.all_to_all_single(sent, splits, splits, self.group_name)
        return ops.wait_tensor(came).transpose(0, 1)

    def _exchange(self, x: Tensor, sent: Tensor, received: Tensor, rows: int) -> Tensor:
        if self.ranks > 1:
            return torch.ops.interlace.exchange_rows(x, sent, received, rows, self.group_name)
        kept = torch.arange(rows, device=x.device) < sent.sum()
        return torch.where(kept.unsqueeze(1), x, 0)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"ranks={self.ranks}, experts_per_chunk={self.experts_per_chunk}"


def by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where each row by expert is among rows by rank, and the other way round.

    counts [ranks, experts] are the rows of each block; rows behind the last stay where they are.
    """
    by_rank, across = counts.flatten(), counts.t().flatten()
    ends, ends_across = by_rank.cumsum(0), across.cumsum(0)
    shift = (ends_across - across).view(counts.shape[::-1]) - (ends - by_rank).view_as(counts).t()
    none, at = by_rank.new_zeros(1), torch.arange(rows, device=counts.device)
    source = (
        at - torch.cat((shift.flatten(), none))[torch.searchsorted(ends_across, at, right=True)]
    )
    target = at + torch.cat((shift.t().flatten(), none))[torch.searchsorted(ends, at, right=True)]
    return source, target


class SelectRows(torch.autograd.Function):
    """`x[index]`, whose gradient is the rows `inverse` of the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return SelectRows.apply(upstream[0], inverse, index), None, None


@torch.library.custom_op("interlace::exchange_rows", mutates_args=())
def exchange_rows(x: Tensor, sent: Tensor, received: Tensor, rows: int, group_name: str) -> Tensor:
    """Rows to the ranks of a group, as many as `sent` says, and from them, as many as `received`.

    What comes follows one another in [rows, ...], and the rest is zero. The gradient goes back.

    Args:
        x: the rows, first those for rank 0; what follows the last is not sent.
        sent, received: i64 [ranks]: the rows for each rank, and from each.
        rows: the rows of the result: the most that may come.
        group_name: the process group's `group_name`.

    Raises:
        InputError: more rows than x or the result has.
        PeerError: another rank has more.
    """
    group = resolve_process_group(group_name)
    given, taken = torch.stack((sent, received)).tolist()
    counts = Counts(lambda: (sent, received), sent=given, received=taken)
    wrong = None
    try:
        counts.check(taken, x.shape[0], rows, group.rank())
    except InputError as error:
        wrong = error
    told = sent.new_empty(group.size())  # by all, before rows move: else peers would wait
    dist.all_gather_into_tensor(told, sent.new_tensor([wrong is not None]), group=group)
    if wrong is not None:
        raise wrong
    if told.any():
        raise PeerError(f"ranks {told.nonzero().flatten().tolist()} have rows that do not fit")
    out = x.new_zeros(rows, *x.shape[1:])
    parts = out[: sum(taken)], x[: sum(given)].contiguous()
    dist.all_to_all_single(*parts, taken, given, group=group)
    return out


@exchange_rows.register_fake
def _(x: Tensor, sent: Tensor, received: Tensor, rows: int, group_name: str) -> Tensor:
    return x.new_empty(rows, *x.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sent, received, _, group_name = inputs
    ctx.save_for_backward(sent, received)
    ctx.facts = x.shape[0], group_name


def _back(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    sent, received = ctx.saved_tensors
    rows, group_name = ctx.facts
    dx = torch.ops.interlace.exchange_rows(upstream.contiguous(), received, sent, rows, group_name)
    return dx, None, None, None, None


exchange_rows.register_autograd(_back, setup_context=_keep)
