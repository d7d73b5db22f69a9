"""The demo's model and text, without compiling: eager, on one rank and on several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from interlace.demo.model import Transformer, parallelize, rotary_table, rotate
from interlace.demo.plan import ModelConfig, TrainingPlan
from interlace.demo.train import batch_at, read_text
from interlace.errors import TeamError

SMALL = ModelConfig(layers=1, dim=32, heads=4, hidden=64, sequence=16, batch=2)
PLAN = TrainingPlan(model=SMALL)


def test_the_text_is_this_python_s_library() -> None:
    text = read_text(200_000)
    assert len(text) == 200_000
    assert b"import" in text
    assert text == read_text(200_000)


def test_batches_depend_on_seed_and_step_alone() -> None:
    text = bytes(range(256)) * 200
    tokens, targets = batch_at(5, PLAN, text)
    assert tokens.shape == targets.shape == (2, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(batch_at(5, PLAN, text)[0], tokens)
    assert not torch.equal(batch_at(6, PLAN, text)[0], tokens)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    table = rotary_table(10, 8).double()
    x = torch.randn(1, 1, 1, 8, dtype=torch.double).expand(1, 1, 10, 8)
    y = rotate(x, table)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    dots = y[0, 0] @ y[0, 0].T
    # The table is computed in fp32: angles are right to 2^-24 of themselves, 10 at most.
    far = 4 * 10 * 2**-24 * float(x[0, 0, 0].square().sum())
    torch.testing.assert_close(dots[2, 5], dots[4, 7], rtol=0.0, atol=far)


def test_attention_is_causal() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


@pytest.mark.parametrize("name", ["heads", "hidden", "sequence"])
def test_sizes_that_do_not_divide_are_an_error(name: str) -> None:
    config = ModelConfig(
        **{**{key: getattr(SMALL, key) for key in SMALL.__dataclass_fields__}, name: 6}
    )
    with pytest.raises(TeamError, match=rf"{name}=6, which 4 ranks do not divide"):
        config.check(4)
    SMALL.check(4)


def losses(parallel: bool) -> list[float]:
    """Five steps of the small model on one batch."""
    torch.manual_seed(0)
    model = Transformer(SMALL)
    if parallel:
        world = torch.distributed.get_world_size()
        parallelize(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    tokens, targets = batch_at(0, PLAN, read_text(50_000))
    found: list[float] = []
    for _ in range(5):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_the_plan_trains_as_one_rank_does(pool) -> None:
    alone = losses(False)
    assert alone[-1] < alone[0]
    for found in pool(2).run(losses, True):
        assert found == pytest.approx(alone, abs=1e-5)
