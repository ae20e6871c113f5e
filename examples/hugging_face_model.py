"""A Hugging Face model with and without qkv: the same logits, and weights that can be read.

    pip install -e ".[hf]" && python examples/hugging_face_model.py

The model is a small Mistral with random weights; nothing is downloaded. Any model of transformers
that uses its attention interface works the same way.
"""

from __future__ import annotations

import torch
from transformers import MistralConfig, MistralForCausalLM

import qkv.hf


def small_mistral() -> MistralForCausalLM:
    """Four layers, eight heads over two kv heads, a window of 64 tokens."""
    config = MistralConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=64,
        max_position_embeddings=8192,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=None,
    )
    return MistralForCausalLM(config).eval()


def main() -> None:
    torch.manual_seed(0)
    model = small_mistral()
    tokens = torch.randint(1, 256, (2, 300))
    real = torch.ones_like(tokens)
    real[0, :40] = 0  # the first prompt is shorter, and padded on the left

    qkv.hf.enable()
    logits, answers = {}, {}
    for implementation in ("eager", "sdpa", "qkv"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(tokens, attention_mask=real).logits[real.bool()]
            answers[implementation] = model.generate(
                tokens, attention_mask=real, max_new_tokens=16, do_sample=False
            )
    for other in ("eager", "sdpa"):
        difference, largest = (logits["qkv"] - logits[other]).abs().max(), logits[other].max()
        print(f"largest difference to {other:5}  {difference:.1e}, of logits up to {largest:.1f}")
    print(f"same 16 tokens generated    {torch.equal(answers['qkv'], answers['eager'])}")

    # Does every layer really go through qkv? A warning says so if not.
    usage = qkv.hf.check(model, tokens, attention_mask=real)
    print(f"layers that call qkv        {len(usage.calls)}")

    # Weights of 4096 tokens in all layers: 2 GiB in float32 if they were stored. A row is read.
    long = torch.randint(1, 256, (1, 4096))
    with torch.no_grad():
        weights = model(long, output_attentions=True).attentions
    last = weights[-1][0, 3, -1]
    print(f"a layer's weights           {weights[-1]}")
    print(f"last token, head 3          {last.max():.2f} of its weight on token {last.argmax()}")


if __name__ == "__main__":
    main()
