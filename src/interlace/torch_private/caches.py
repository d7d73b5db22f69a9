"""Private names of torch's caches on disk, and of the archive that `save_cache_artifacts` makes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch._functorch import config as functorch_config
from torch.compiler._cache import CacheArtifact as CacheArtifact
from torch.compiler._cache import CacheArtifactFactory as CacheArtifactFactory
from torch.compiler._cache import CacheArtifactManager as CacheArtifactManager


def cache_dir() -> str:
    """Folder of Inductor's cache, which is made where need be."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def are_graphs_cached() -> bool:
    """True unless torch is told to keep no compiled graphs (TORCHINDUCTOR_AUTOGRAD_CACHE=0,
    TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)."""
    disabled = getattr(torch.compiler.config, "force_disable_caches", False)
    return bool(functorch_config.enable_autograd_cache) and not disabled
