"""The layout that is read from a configuration, beside the rotation of each model's own code."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import qkv
from qkv.positions.hf_config import BACKWARDS, INTERLEAVED, INTERLEAVED_UNLESS_SAID

N, DIM = 6, 8
REPEATED = ("cohere", "cohere2", "cohere2_moe", "ernie4_5_vl_moe", "glm4v", "glm_ocr")
"""Models whose cosines stand twice side by side, not in two halves."""
HALF_SPLIT = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss", "olmo2", "phi3", "granite")
MODELS = sorted(
    {*HALF_SPLIT, *BACKWARDS, *INTERLEAVED_UNLESS_SAID, *INTERLEAVED}
    - {"codegen", "gptj", "roformer"}
    - {"moonshine_streaming"}
)
OF_PICTURES = {
    "edgetam_video", "efficientloftr", "lightglue", "sam2_video", "sam3", "sam3_tracker_video",
}  # fmt: skip
"""Models that turn places of pictures."""
PAIRS_NEIGHBOURS = re.compile(
    r"def rotate_half\(x\):(?:(?!\ndef ).)*\[\.\.\., ?0?::2\]"
    r"|def apply_rotary_pos_emb_interleave\(|view_as_complex",
    re.DOTALL,
)


def rotated(model: str, x: torch.Tensor) -> torch.Tensor:
    """Rows `(1, heads, n, dim)`, turned by the function in the model's own file."""
    module = import_module(f"transformers.models.{file_of(model)}.modeling_{file_of(model)}")
    angles = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2).double() / DIM)
    names = ["apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb", "apply_rotary_emb"]
    function = next(getattr(module, name) for name in names if hasattr(module, name))
    turn = torch.polar(torch.ones_like(angles), angles)
    if function.__name__ == "apply_rotary_emb":
        if file_of(model) == "llama4":  # Its rows lie before its heads.
            return function(x.transpose(1, 2), x.transpose(1, 2), turn[None])[0].transpose(1, 2)
        return function(x, x, turn[None])[0]
    if model in ("deepseek_v4", "gpt_oss", "openai_privacy_filter"):
        both = angles
    elif model.removesuffix("_text") in REPEATED or model.startswith("blt"):
        both = angles.repeat_interleave(2, -1)
    else:
        both = torch.cat([angles, angles], -1)
    if model == "deepseek_v4":
        return function(x, both.cos()[None], both.sin()[None])
    return function(x, x, both.cos()[None], both.sin()[None])[0]


def file_of(model: str) -> str:
    """The folder of transformers with the code of a `model_type`."""
    if model == "sarvam_mla":
        return "deepseek_v3"
    return "blt" if model.startswith("blt") else model.removesuffix("_text")


@pytest.mark.sampled("model", MODELS, one_in=4)
def test_the_scores_are_those_of_the_rotation_of_the_model(model: str) -> None:
    """Scores, because some models put the turned pairs at other places of a row."""
    x = torch.randn(1, 2, N, DIM, dtype=torch.float64)
    theirs = rotated(model, x).double()
    rope = qkv.RoPE.from_hf_config({"model_type": model, "head_dim": DIM})
    ours = rope.rotate(x, torch.arange(N))
    torch.testing.assert_close(ours @ ours.mT, theirs @ theirs.mT, rtol=0, atol=1e-5)


def test_every_model_of_text_whose_code_pairs_neighbours_is_known() -> None:
    """New models were read as ones that rotate halves, which changes every score."""
    folder = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if PAIRS_NEIGHBOURS.search(path.read_text(encoding="utf-8"))
    }
    assert "llama" not in found
    assert found - OF_PICTURES <= {file_of(model) for model in MODELS} | {"moonshine_streaming"}


def test_a_field_of_the_configuration_comes_before_the_habit_of_its_family() -> None:
    config = {"model_type": "deepseek_v3", "qk_rope_head_dim": DIM}
    for said, layout in ((None, "interleaved"), (True, "interleaved"), (False, "half_split")):
        fields = config if said is None else {**config, "rope_interleave": said}
        assert qkv.RoPE.from_hf_config(fields).layout == layout
    assert qkv.RoPE.from_hf_config({"head_dim": DIM}).layout == "half_split"
    assert np.all(np.asarray(qkv.RoPE.from_hf_config({"head_dim": DIM}).inv_freq) > 0)
