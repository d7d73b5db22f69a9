"""Runs the kernels of the cross-entropy in Triton's interpreter; see test_interpreted.py.

The launches themselves are what is tested, with CPU tensors: how rows of any strides are found, how
they are cut into parts, and each kernel with each of its options, against the reference in fp64.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from tests.support.interpreting import run

from interlace.nn.cross_entropy import launch, layout, reference
from interlace.nn.cross_entropy.steps import Problem, Shards, Terms, new_word


def interpreted(
    name: str, grid: Any, tensors: Any, numbers: Any, constants: Any, _: int = 4
) -> None:
    """Stands in for the launcher of compiled kernels."""
    launch.KERNELS[name][grid](*tensors, *numbers, **dict(constants))


launch.launch = interpreted

# Infinities and their differences are among what is tested.
warnings.filterwarnings("ignore", category=RuntimeWarning)


def strided(draw: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Logits of that shape, some of them views of something larger."""
    *batch, classes = shape
    how = draw.choice(["dense", "rows", "columns", "transposed", "offset", "permuted"])
    if how == "rows" and batch:
        more = torch.randn(*batch[:-1], batch[-1] + 1, classes)
        return more.to(dtype)[..., : batch[-1], :]
    if how == "columns":
        return torch.randn(*batch, classes + 3).to(dtype)[..., 1 : 1 + classes]
    if how == "transposed" and batch:
        return torch.randn(classes, *batch).to(dtype).movedim(0, -1)
    if how == "offset":
        return torch.randn(3 + torch.Size(shape).numel()).to(dtype)[3:].view(shape)
    if how == "permuted" and len(batch) > 1:
        back = range(len(batch) - 1, -1, -1)
        return torch.randn(*reversed(batch), classes).to(dtype).permute(*back, len(batch))
    return torch.randn(shape).to(dtype)


def targets(draw: random.Random, batch: tuple[int, ...], classes: int, bad: bool) -> torch.Tensor:
    found = torch.randint(0, classes, (*batch, 2)) if draw.random() < 0.5 else None
    y = torch.randint(0, classes, batch) if found is None else found[..., 0]
    flat = torch.rand(batch)
    y[flat < 0.2] = -100
    if bad:
        y[flat > 0.9] = draw.choice([classes, classes + 7, -1])
    return (y.int() if draw.random() < 0.3 else y).contiguous()


def close(got: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float, what: object) -> None:
    torch.testing.assert_close(
        got.double(),
        wanted.double(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda m: f"{m}\n{what}",
    )


def check(draw: random.Random) -> None:
    dtype = draw.choice([torch.float16, torch.float32])  # the interpreter cuts bfloat16 off
    batch = draw.choice([(), (1,), (5,), (2, 3), (2, 2, 3), (2, 1, 2, 2)])
    world = draw.choice([1, 1, 2, 3])
    sizes = [draw.choice([64, 136, 37, 1, 0, 700]) for _ in range(world)]
    sizes[0] = max(sizes[0], 1)
    classes = sum(sizes)
    terms = Terms(
        ignore_index=-100,
        smoothing=draw.choice([0.0, 0.1]),
        z_loss=draw.choice([0.0, 0.01]),
    )
    weights = torch.rand(classes) if draw.random() < 0.4 else None
    if weights is not None and draw.random() < 0.5:
        weights = torch.rand(classes, 2)[:, 1]
    y = targets(draw, batch, classes, bad=draw.random() < 0.3)
    shards = [strided(draw, (*batch, size), dtype) for size in sizes]
    offset = draw.choice([0.0, 0.0, 50.0])
    for shard in shards:
        shard += offset
        if draw.random() < 0.2 and shard.numel() and not terms.smoothing:
            shard[..., shard.shape[-1] // 2 :] = -torch.inf
        if draw.random() < 0.3 and shard.numel():  # masked classes, wherever they are
            start = draw.choice([0, draw.randrange(shard.shape[-1])])
            shard[..., start : start + draw.choice([1, 5, 40])] = draw.choice([-6e4, -1e9])
    layout.PROGRAMS = draw.choice([1, 2048])  # whole rows, or parts of them
    layout.PART_TILES = 1
    layout.WARPS, launch.GRAD_TILES = draw.choice([1, 2]), draw.choice([1, 2])
    layout.cut_of.cache_clear()
    device_sizes = torch.tensor(sizes) if world > 1 else None
    what = (
        dtype,
        batch,
        sizes,
        terms,
        weights is not None,
        [s.stride() for s in shards],
        y.stride(),
    )
    problems: list[Problem] = []
    for rank, shard in enumerate(shards):
        start = sum(sizes[:rank])
        own = None if weights is None else weights[start : start + sizes[rank]]
        place = Shards(rank, world, classes if world == 1 else 0, device_sizes)
        problems.append(Problem(shard, y, own, terms, place, new_word("cpu")))
    before = [shard.clone() for shard in shards]
    if world == 1:
        results = [launch.alone(problems[0])]
    else:
        packed = torch.stack([launch.pack(p, launch.stats(p)) for p in problems])
        results = [launch.losses(p, packed) for p in problems]
    whole = Problem(
        torch.cat([shard.double() for shard in shards], -1), y,
        None if weights is None else weights.double(), terms, Shards.alone(classes),
        new_word("cpu"),
    )  # fmt: skip
    wanted, figures = reference.alone(whole)
    for loss, kept in results:
        assert torch.equal(loss.nan_to_num(nan=-1.0), results[0][0].nan_to_num(nan=-1.0)), what
        close(loss, wanted, 1e-5, 1e-5 * (1 + offset), what)
        assert torch.equal(kept[1] == torch.inf, figures[1] == torch.inf), what
        if weights is not None:
            close(kept[-1], figures[-1], 1e-6, 1e-6, what)
    noted = int(problems[0].word[0])
    assert bool(noted) == bool(int(whole.word[0])), what
    if noted:
        assert int(problems[0].word[1]) == int(y.reshape(-1)[noted - 1]), what
        assert int(problems[0].word[2]) == classes, what
    for problem in problems:
        assert float(launch.count(problem)) == float(reference.count(problem)), what
    lengths = [draw.choice([0, 7, draw.randrange(1, 5000)]) for _ in range(draw.randint(1, 3))]
    scaled = [strided(draw, (length,), dtype).contiguous() for length in lengths]
    factor = torch.tensor(draw.choice([1.0, 0.0, -1.7]))
    by_reference = [tensor.clone() for tensor in scaled]
    reference.scale(by_reference, factor)
    launch.scale(scaled, factor)
    assert all(map(torch.equal, scaled, by_reference)), (what, lengths, factor)
    mean = draw.random() < 0.5
    given = draw.choice([None, 3.5, torch.tensor(7)])
    for loss, kept in results[:1]:
        heavy = weights is not None
        got = launch.total(loss, kept, heavy, mean, given)
        for a, b in zip(got, reference.total(wanted, figures, heavy, mean, given), strict=True):
            close(a, b, 1e-5, 1e-5 * (1 + offset), (what, mean, given))
    up = draw.choice([None, "divisor", "number", "rows"])
    upstream = torch.randn(batch if up == "rows" else ()) if up in ("number", "rows") else None
    divisor = torch.tensor(2.5) if up in ("divisor", "number") else None
    grads = [
        launch.gradient(p, kept, upstream, divisor)
        for p, (_, kept) in zip(problems, results, strict=True)
    ]
    for shard, old in zip(shards, before, strict=True):
        assert torch.equal(shard, old), "the logits were written to"
    expected = reference.gradient(
        whole, figures, None if upstream is None else upstream.double(), divisor
    )
    unit = 2.0**-11 if dtype == torch.float16 else 1e-6
    close(torch.cat(grads, -1), expected, unit + 2e-5, unit * 1e-2 + 2e-7 * (1 + offset), what)


def check_masks(classes: int) -> None:
    """Smoothing where numbers as low as can be mask the first class, or the first few."""
    low = torch.finfo(torch.float32).min
    x = torch.randn(2, classes)
    x[0, 0], x[1, :20] = low, low / 32
    y, terms = torch.tensor([classes - 1, 0]), Terms(smoothing=0.1)
    one = Problem(x, y, None, terms, Shards.alone(classes), new_word("cpu"))
    whole = Problem(x.double(), y, None, terms, Shards.alone(classes), new_word("cpu"))
    close(launch.alone(one)[0], reference.alone(whole)[0], 1e-5, 0.0, classes)


if __name__ == "__main__":
    run(check, once=lambda draw: check_masks(draw.choice([64, 133, 3000])))
