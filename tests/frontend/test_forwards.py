"""Forward passes are told apart by what they made, whatever else they saved."""

from __future__ import annotations

import torch
from torch import nn

from interlace.frontend.calling.forwards import Forwards


class Weight(nn.Parameter):
    """A Parameter of the user's own kind."""


def test_a_pass_is_known_by_what_it_made_also_among_tensors_of_other_kinds() -> None:
    """Of three Parameters, what the pass made, and an input: each pass makes another tensor."""
    forwards = Forwards()
    forwards.num_saved, forwards.are_counted, forwards.marks = 5, True, slice(3, 4)
    weights, x = [Weight(torch.ones(2)) for _ in range(3)], torch.ones(2)
    passes = [[*weights, torch.ones(2), x] for _ in range(3)]
    for saved in passes:
        forwards.note([torch.ones(1), *saved])
    tangent = torch.ones(1)
    found = [forwards.origin([*passes[number], tangent]) for number in (1, 2, 0)]
    assert found == ["of forward 2", "of forward 3", "of forward 1"]
    assert forwards.origin([*weights, torch.ones(2), x, tangent]) == ""
