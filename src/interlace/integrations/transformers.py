"""Overlapped layers in models that `from_pretrained` of transformers distributes.

    import interlace.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")

The import registers styles for the words of a plan whose communication overlaps: those of
row-parallel layers, whose sum over the ranks runs under their matmul. All other words of the
installed release keep transformers' own styles, as do layers that `OverlapRowwise` does not take.
"""

from __future__ import annotations

import logging
import types
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import InputError, UnsupportedError
from interlace.float8 import Recipe
from interlace.nn.parallel.linear import Given
from interlace.tensor_parallel.hugging_face import overlapped_words
from interlace.tensor_parallel.styles import OverlapRowwise

try:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel
except ImportError as error:
    raise UnsupportedError(
        f"transformers has no plans of DTensors ({error}): install transformers 5.17 or newer, or "
        "parallelise the model with interlace.tensor_parallel.parallelize"
    ) from error

log = logging.getLogger(__name__)


def register(*, options: Given = None, recipe: Recipe | None = None) -> tuple[str, ...]:
    """Registers overlapped styles in transformers, for models that are loaded from now on.

    Args:
        options: as of `interlace.tensor_parallel.OverlapRowwise`.
        recipe: multiplies these layers in FP8.

    Returns:
        The words of plans that overlap.

    Raises:
        InputError: `options` or `recipe` is not valid.
    """
    plans: Any = ALL_PARALLEL_STYLES
    styles = overlapped_words({"options": options}, recipe)
    for word, style in styles.items():
        plans.register(word, _Rowwise(style))
    return (*styles,)


class _Rowwise(RowwiseParallel):
    """A row-parallel layer of transformers, whose sum runs under its matmul."""

    def __init__(self, style: OverlapRowwise) -> None:
        (given,), (wanted,) = style.input_layouts, style.output_layouts
        super().__init__(input_layouts=given, output_layouts=wanted)
        self.style = style

    def validate_param(
        self, module: Any, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Raises for sizes that the style refuses; says which layers do not overlap."""
        super().validate_param(module, param, mesh, parameter_name)
        if param != "weight":
            return
        if why := self._why(module, mesh):
            log.warning("%s does not overlap: %s", parameter_name, why)
            return
        try:
            self.style.check_sizes(module, mesh)
        except InputError as error:
            raise InputError(f"{parameter_name}: {error}") from None

    def install_forward(self, module: Any, mesh: DeviceMesh) -> nn.Module:
        """Replaces the module's forward."""
        super().install_forward(module, mesh)
        if self._why(module, mesh) is not None:
            return module
        stock, overlapped = module.forward, self.style.forward_on(mesh)

        def forward(self_: Any, x: Any) -> Any:
            if getattr(self_, "_hf_quantized_needs_local_tp", False):  # known once it is loaded
                return stock(x)
            return overlapped(self_, x)

        module.forward = types.MethodType(forward, module)
        return module

    def _why(self, module: Any, mesh: DeviceMesh) -> str | None:
        """Why a module keeps transformers' own style, which takes it; None where it does not."""
        if (why := self.style.why(module)) is None and module.in_features % mesh.size():
            return f"{mesh.size()} ranks have unequal parts of its {module.in_features} features"
        return why


register()
