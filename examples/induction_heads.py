"""Find the induction heads of a model, and the heads that they build on.

    python examples/induction_heads.py [MODEL]

Random tokens are repeated once. A head that has learnt "what came after this token before comes
again" then looks, from every token of the second half, at what followed it in the first: Olsson et
al., "In-context Learning and Induction Heads" (2022). Without MODEL it is the tiny model that comes
with qkv, which needs NumPy alone; MODEL is a folder or name of a causal model of transformers.
"""

from __future__ import annotations

import sys

import numpy as np

from qkv.inspection.models.model_record import ModelRecord
from qkv.samples.tiny import tiny_model

PERIOD = 50


def of_tiny_model() -> ModelRecord:
    model = tiny_model()
    ids = model.repeated_sequence(PERIOD)
    record = ModelRecord(model.name, keep="weights")
    for number, (query, key, _, variants) in enumerate(model.attention_inputs(ids)):
        record.add(query, key, *variants, name=f"layer {number}", tokens=np.array([ids]))
    return record


def of_transformer(name: str) -> ModelRecord:
    import torch
    from transformers import AutoModelForCausalLM

    import qkv.hf

    model = AutoModelForCausalLM.from_pretrained(name).eval()
    generator = torch.Generator().manual_seed(0)
    once = torch.randint(
        model.config.get_text_config().vocab_size, (1, PERIOD), generator=generator
    )
    with torch.no_grad(), qkv.hf.inspect(model, keep="weights") as record:
        model(torch.cat([once, once], dim=1))
    return record


def main(name: str | None = None) -> None:
    record = of_transformer(name) if name else of_tiny_model()
    print(record.heads(), end="\n\n")
    for score in ("previous", "induction"):
        best = record.best(score)
        assert best is not None
        layer, head = best["layer"], best["head"]
        print(f"most {score:9}  layer {layer} head {head}, mean weight {best[score]:.2f}")
        # The same from the weights themselves: one diagonal of the matrix.
        weights = record[layer].weights[0, head]
        back = 1 if score == "previous" else PERIOD - 1
        rows = np.arange(1 if score == "previous" else PERIOD, 2 * PERIOD)
        print(f"                weights {back} behind the diagonal: "
              f"{weights[rows, rows - back].mean():.2f}")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:2])
