"""Private names of torch's own tests, which predictions on one rank need."""

from __future__ import annotations

from torch.testing._internal.distributed import fake_pg as fake_pg
