"""What is compiled at the first call of a process is not compiled again at the second."""

import pytest

from tests.processes import in_a_process

ATTENTION = """
    query = torch.randn(1, 2, 4, 8)

    def compiled():
        return qkv.attention(query, query, query, qkv.Causal(), qkv.ALiBi())
"""
MODEL = """
    from transformers import LlamaConfig, LlamaModel

    import qkv.hf

    qkv.hf.enable()
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    model.set_attn_implementation("qkv")
    ids = torch.ones(2, 5, dtype=torch.long)

    def compiled():
        return model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", [ATTENTION, MODEL], ids=["attention", "model"])
def test_the_first_call_of_a_process_compiles_once(call: str) -> None:
    """Graphs that torch made are counted, of a function that is called three times."""
    script = """
    import torch
    from torch._dynamo.testing import CompileCounter

    import qkv
    {call}
    counter = CompileCounter()
    function = torch.compile(compiled, backend=counter, fullgraph=True)
    for _ in range(3):
        function()
    print(counter.frame_count)
    """
    assert in_a_process(script.replace("    {call}", call)).split()[-1] == "1"
