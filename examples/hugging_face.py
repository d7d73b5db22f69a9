"""A Hugging Face model, parallelised by the `tp_plan` that it brings, with layers that overlap.

    torchrun --nproc-per-node 2 examples/hugging_face.py

It needs transformers (`pip install "transformers>=5.17"`). The weights are random, from a
configuration: nothing is downloaded. `from_pretrained` gives a model that is used in the same way.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.tensor_parallel import parallelize

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f'{error}. This example needs transformers: pip install "transformers>=5.17"')

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    pad_token_id=None,
)


def main() -> None:
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    whole: Any = LlamaForCausalLM(CONFIG)
    whole.to(DEVICE)
    tokens = torch.randint(CONFIG.vocab_size, (2, 64), device=DEVICE)

    # The model's own plan; Parameters become DTensors under the same names.
    model = copy.deepcopy(whole)
    done = parallelize(model, mesh)

    # Training: the loss is that of the whole model.
    loss, whole_loss = (each(tokens, labels=tokens).loss for each in (model, whole))
    loss.backward()
    torch.testing.assert_close(loss, whole_loss, rtol=1e-4, atol=0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # all of them are DTensors
    model.zero_grad()

    # Generation, as ever.
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found, wanted = (each.generate(tokens[:1, :8], **given) for each in (model, whole))
    assert torch.equal(found, wanted)

    # Under torch.compile the same layers are one graph, which this backend overlaps.
    compiled = torch.compile(model, backend="interlace")
    compiled_loss = compiled(tokens, labels=tokens).loss
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss, whole_loss, rtol=1e-4, atol=0)

    if dist.get_rank() == 0:
        for name, style in done.applied.items():
            print(f"{name}: {style}")
        print(interlace.explain(compiled))
        print(f"loss {loss:.6f}, of the whole model {whole_loss:.6f}")
        print("generated", found[0, 8:].tolist())


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
