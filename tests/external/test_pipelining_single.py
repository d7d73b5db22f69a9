"""The steps of GPipe and 1F1B are those that torch's own code takes, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from interlace_check.pipelining.single import SINGLE

Steps = list[tuple[str, tuple[str, ...]]]


class Stage:
    """A stage that writes down what is asked of it."""

    has_backward = True
    submod = None

    def __init__(self, index: int, num_stages: int, steps: Steps) -> None:
        self.stage_index = self.group_rank = index
        self.num_stages = self.group_size = num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.steps = steps

    def message(self, kind: str, microbatch: int) -> list[SimpleNamespace]:
        beyond = self.is_first if kind in ("RECV_F", "SEND_B") else self.is_last
        peer = self.stage_index + (1 if kind in ("SEND_F", "RECV_B") else -1)
        token = f"{self.stage_index}{kind}{microbatch}"
        return [] if beyond else [SimpleNamespace(token=token, group_peer=peer, peer=peer)]

    def get_fwd_recv_ops(self, microbatch: int) -> list[SimpleNamespace]:
        return self.message("RECV_F", microbatch)

    def get_fwd_send_ops(self, microbatch: int) -> list[SimpleNamespace]:
        return self.message("SEND_F", microbatch)

    def get_bwd_recv_ops(self, microbatch: int) -> list[SimpleNamespace]:
        return self.message("RECV_B", microbatch)

    def get_bwd_send_ops(self, microbatch: int) -> list[SimpleNamespace]:
        return self.message("SEND_B", microbatch)

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.steps.append(("compute", (f"{self.stage_index}F{microbatch}",)))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.steps.append(("compute", (f"{self.stage_index}B{microbatch}",)))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def torch_steps(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: int, ranks: int, microbatches: int
) -> Steps:
    """What torch's schedule does on a rank: computes, issues messages together, awaits them."""
    steps: Steps = []

    def issue(ops: list[Any], desc: str | None = None) -> list[tuple[str, ...]]:
        tokens = tuple(op.token for op in ops)
        steps.extend([("issue", tokens)] if ops else [])
        return [tokens] if ops else []

    def issue_sorted(ops: list[Any], desc: str | None = None) -> dict[int, Any]:
        assert len({op.peer for op in ops}) <= 1, "one stage has one neighbour on each side"
        return {op.peer: issue(ops) for op in ops}

    def wait(works: list[tuple[str, ...]]) -> None:
        steps.extend(("await", tokens) for tokens in works)

    monkeypatch.setattr(schedules, "_batch_p2p", issue)
    monkeypatch.setattr(schedules, "_sorted_batch_p2p", issue_sorted)
    monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
    schedule: Any = getattr(schedules, name)(Stage(rank, ranks, steps), microbatches)
    arguments: Any = [()] * microbatches, [{}] * microbatches
    monkeypatch.setattr(schedule, "_check_inputs", lambda *_, **__: arguments)
    for other in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(schedule, other, lambda *_, **__: None)
    schedule._step_microbatches(*arguments)
    return steps


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (2, 5), (3, 7), (5, 5)])
def test_steps_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: int, microbatches: int
) -> None:
    for rank in range(ranks):
        ours = [
            (step.what, tuple(str(placed.action) for placed in step.actions))
            for step in SINGLE[name](rank, ranks, microbatches)
        ]
        assert ours == torch_steps(monkeypatch, name, rank, ranks, microbatches)
