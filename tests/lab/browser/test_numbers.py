"""Numbers of the golden file, read from the DOM of the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.browser

GOLDENS = json.loads((Path(__file__).parents[2] / "golden" / "goldens.json").read_text("utf-8"))

HALF_A_UNIT = 0.5001e-12
"""Half a unit of the twelfth decimal, the last that the golden file has."""

CASES: dict[str, dict[str, Any]] = {
    "textbook_3x3": {"ex": "textbook"},
    "unscaled_cat_sat_mat": {"ex": "cat-sat-mat"},
    "primer_the_cat_sat": {"ex": "primer"},
    "shared_example": {},
    "shared_example_unscaled": {"scaled": 0},
    "shared_example_causal": {"mask": "causal"},
    "shared_example_causal_window_2": {"mask": "window", "left": 1},
    "shared_example_causal_window_3": {"mask": "window", "left": 2},
}


def floats(rows: Any) -> np.ndarray:
    return np.array(
        [[-np.inf if x is None else x for x in row] for row in rows] if np.ndim(rows[0]) else rows
    )


def near(given: Any, wanted: Any, most: float = HALF_A_UNIT) -> None:
    np.testing.assert_allclose(np.asarray(given), floats(wanted), rtol=0, atol=most)


@pytest.mark.parametrize("name", CASES)
def test_matrices_of_the_texts(lab: Any, name: str) -> None:
    exact = GOLDENS["cases"][name]["exact"]
    for stage, key in (("raw", "raw"), ("masked", "scaled"), ("weights", "weights")):
        lab.open("heatmap", stage=stage, **CASES[name])
        near(lab.grid(f"{stage} matrix"), exact[key])
    near(lab.grid("Output"), exact["output"])
    near(lab.numbers('[data-name="lse"]'), exact["lse"])
    near(lab.numbers('[data-name="entropy"]'), exact["entropy_nats"])


def test_all_arithmetic_of_each_cell(lab: Any) -> None:
    exact = GOLDENS["cases"]["shared_example"]["exact"]
    for i in range(5):
        for j in range(5):
            lab.open("heatmap", token=i, key=j) if j == 0 else lab.page.hover(
                f'table[aria-label="weights matrix"] td[data-row="{i}"][data-column="{j}"]'
            )
            lab.page.wait_for_selector(f'[data-cell="{i},{j}"]')
            for name, key in (("raw", "raw"), ("scaled", "scaled"), ("weight", "weights")):
                near(lab.numbers(f'.arithmetic [data-name="{name}"]'), [exact[key][i][j]])


def test_a_mouse_at_rest_does_not_change_what_a_link_chose(lab: Any) -> None:
    lab.open("heatmap", token=0, key=0)
    lab.page.hover('table[aria-label="weights matrix"] td[data-row="2"][data-column="4"]')
    lab.page.wait_for_selector('[data-cell="2,4"]')
    lab.open("start")
    lab.open("heatmap", token=3, key=0)  # The matrix comes to lie under the mouse again.
    lab.page.wait_for_timeout(300)
    assert lab.page.is_visible('[data-cell="3,0"]')


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_tiles_end_in_the_same_digits(lab: Any, block: int) -> None:
    exact = GOLDENS["cases"]["shared_example_causal"]["exact"]
    for token in (0, 4):
        lab.open("tiles", mask="causal", block=block, token=token)
        near(lab.numbers('[data-name="tiled"]'), exact["output"][token])
        assert "the same 12 digits" in lab.page.inner_text("main")


def test_twelve_digits_are_shown(lab: Any) -> None:
    lab.open("heatmap", digits=12)
    shown = lab.page.inner_text('table[aria-label="weights matrix"] td[data-row="0"]')
    assert shown == "0.109496351547"


def test_the_ledger_of_thirty_steps(lab: Any) -> None:
    wanted = GOLDENS["operation_ledger"]["example_3x3"]
    lab.open("count")
    assert lab.page.inner_text(".place") == "step 1 of 30"
    for _ in range(29):
        lab.page.keyboard.press("ArrowRight")
    assert lab.page.inner_text(".place") == "step 30 of 30"
    rows = lab.table("Ledger")
    assert [int(so_far) for _, so_far, _ in rows] == list(wanted.values())
    assert [int(of) for *_, of in rows] == list(wanted.values())


def test_the_ledger_of_other_sizes(lab: Any) -> None:
    lab.open("count", n=5, d=4)
    wanted = GOLDENS["operation_ledger"]["shared_example"]
    counts = [int(row[2].replace(",", "")) for row in lab.table("Operations")]
    assert counts[:-1] == list(wanted.values())
    lab.open("count", n=1000, d=512)
    assert lab.table("Operations")[-1][2] == f"{GOLDENS['flops']['n1000_d512']:,}"
    for n, entries in GOLDENS["score_matrix_entries"].items():
        lab.open("count", n=n)
        assert lab.table("Memory")[0][2] == f"{entries:,}"
    lab.open("count", n=100_000)
    assert f"{GOLDENS['fp16_bytes_per_head']['100000']:,} bytes" in lab.table("Memory")[1][2]


def test_real_models(lab: Any) -> None:
    lab.open("count")
    rows = {row[0]: row for row in lab.table("Real models")}
    for model in GOLDENS["real_world_scale"]:
        if model["model"] not in rows:
            continue
        _, layers, heads, head_dim, tokens, entries, products = rows[model["model"]]
        assert int(layers) == model["layers"]
        assert int(heads) == model["heads"]
        assert int(head_dim) == model["head_dim"]
        assert int(tokens.replace(",", "")) == model["tokens"]
        assert int(entries.replace(",", "")) == model["score_entries"]
        assert int(products.replace(",", "")) == model["qk_multiply_adds"]
    assert len(rows) == 5


def test_saturation(lab: Any) -> None:
    golden = GOLDENS["saturation"]
    names = ("max_weight", "entropy_nats", "gradient_trace")
    for d_k, point in golden["unscaled"].items():
        if int(d_k) < 64:  # Products of shorter rows are not the normal numbers of the goldens.
            continue
        lab.open("scaling", dk=d_k)
        plain = lab.numbers(".reading .plain")
        near(plain, [point[name] for name in names], most=0.003)
        even = lab.numbers(".reading .even")
        near(even, [golden["scaled_any_d_k"][name] for name in names], most=0.003)
    assert f"{golden['runner_up_gradient_at_delta_10']:.4e}".replace("e-05", "e-5") in (
        lab.page.inner_text(".claims")
    )


def test_what_the_curves_measure_is_explained(lab: Any) -> None:
    page = lab.open("scaling")
    assert "p (1 − p) is how fast" in page.inner_text('section:has(h3:text-is("This draw"))')


def test_the_draw_is_of_dot_products(lab: Any) -> None:
    query, *keys = np.random.default_rng(0).normal(size=(6, 1024)).round(3)
    for d_k in (1, 3, 1024):
        lab.open("scaling", dk=d_k)
        products = [query[:d_k] @ key[:d_k] for key in keys]
        near(lab.numbers(".plain .bars dt"), products)
        near(lab.numbers(".even .bars dt"), [x / d_k**0.5 for x in products])


def test_mechanisms(lab: Any) -> None:
    cases = GOLDENS["cases"]
    for name, wanted in (
        ("scaled-dot-product", cases["shared_example"]["exact"]),
        ("dot-product", cases["shared_example_unscaled"]["exact"]),
        ("causal", cases["shared_example_causal"]["exact"]),
        ("linear", cases["shared_example_linear_elu1"]["exact"]),
    ):
        lab.open("mechanisms", mech=name)
        near(lab.grid("Token mixing"), wanted["weights"])
        near(lab.grid("Output"), wanted["output"])


def test_edited_numbers_are_followed(lab: Any) -> None:
    """The exercise of the texts, typed in, and read in three panels."""
    case = GOLDENS["cases"]["exercise_hand_compute"]
    own = [["a", "b"]] + [
        ",".join(" ".join(str(x) for x in row) for row in case[name]) for name in "qkv"
    ]
    lab.open("heatmap", ex="own", own=json.dumps(own), scaled=0)
    near(lab.grid("weights matrix"), case["exact"]["weights"])
    near(lab.grid("Output"), case["exact"]["output"])
    lab.open("pipeline", ex="own", own=json.dumps(own), scaled=0, step=9, token=1)
    near(lab.numbers('tbody td[data-column="weights"]'), case["exact"]["weights"][1])
    lab.open("code", ex="own", own=json.dumps(own), scaled=0, token=1)
    near(lab.numbers('[data-line="8"]'), case["exact"]["output"][1])
