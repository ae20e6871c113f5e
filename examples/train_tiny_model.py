"""Train the model that comes with qkv, and see a previous-token head and induction heads form.

    pip install -e ".[torch]" && python examples/train_tiny_model.py

Two layers of attention and nothing else read random characters that repeat after a random period.
What comes the first time cannot be known; what comes again can, by looking back. The way to do it
takes two heads: one in layer 0 that tells each character what came before it, and one in layer 1
that looks for the present character in those notes, finds the one after its earlier occurrence, and
repeats it. Before both are there, neither is worth anything: so the loss falls all at once.

Some minutes on one core. Writes `tiny.safetensors`, `tiny_loss.json` and `tiny_loss.svg` into the
current folder, or where `--into` says. The seed is fixed: the same machine makes the same bytes.

Source: Olsson et al., "In-context Learning and Induction Heads" (2022).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

import qkv
import qkv.torch
from qkv.samples.decoder import EPSILON
from qkv.samples.tiny import ALPHABET, LAYERS, NUM_HEADS, TinyModel

WIDTH = 64
BATCH, LENGTH, SHORTEST_PERIOD = 32, 64, 8
STEPS, WARM_UP, LEARNING_RATE = 3000, 1 / 30, 1e-2
SEED = 0
LOOK_EVERY = 25
"""Steps between points of the curve; each is the mean of the losses since the last."""

Curve = dict[str, list[float]]
COLUMNS = ("step", "loss first time", "loss again", "previous-token head", "induction head")


class Transformer(nn.Module):
    """The model of `qkv.samples.tiny`, in torch: its attention is qkv's, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), WIDTH)
        self.layers = nn.ModuleList(
            qkv.torch.MultiHeadAttention(WIDTH, NUM_HEADS, bias=False) for _ in LAYERS
        )
        self.unembedding = nn.Linear(WIDTH, len(ALPHABET), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for attention, variants in zip(self.layers, LAYERS, strict=True):
            x = x + attention(norm(x), None, None, *variants)
        logits: Tensor = self.unembedding(norm(x))
        return logits


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON)


def repeated_sequences(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of random characters, each with a period of its own, and which of them are repeats.

    Of a single period, a head could learn the distance instead of what to look for.
    """
    once = torch.randint(len(ALPHABET), (BATCH, LENGTH), generator=generator)
    period = torch.randint(SHORTEST_PERIOD, LENGTH // 2 + 1, (BATCH, 1), generator=generator)
    position = torch.arange(LENGTH)
    return once.gather(1, position % period), position >= period


def next_token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Negative log probability in nats of each character but the first, (batch, length - 1)."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def best_heads(model: nn.Module) -> tuple[float, float]:
    """Most weight that a head of layer 0 gives to the previous character, and that a head of layer
    1 gives to the one after the earlier occurrence of the present one."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    tiny, period = TinyModel(weights), LENGTH // 2
    first, second = (
        qkv.inspect(query, key, value, *variants)
        for query, key, value, variants in tiny.attention_inputs(tiny.repeated_sequence(period))
    )
    previous = first.mass_at(-1)[:, 1:].mean(axis=1)
    after_earlier = second.mass_at(1 - period)[:, period:].mean(axis=1)
    return float(previous.max()), float(after_earlier.max())


def train(steps: int) -> tuple[Transformer, Curve]:
    """The trained model and its curve."""
    torch.set_num_threads(1)  # sums in one order: the same bits on any number of cores
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (WARM_UP * steps)) * (1 - step / steps)
    )
    curve: Curve = {name: [] for name in COLUMNS}
    since: list[tuple[float, float]] = []
    for step in range(1, steps + 1):
        ids, repeats = repeated_sequences(generator)
        losses = next_token_losses(model, ids)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        schedule.step()
        again = repeats[:, 1:]
        since.append((losses[~again].mean().item(), losses[again].mean().item()))
        if step == 1 or step % LOOK_EVERY == 0 or step == steps:
            point = (step, *np.mean(since, axis=0).tolist(), *best_heads(model))
            for name, value in zip(COLUMNS, point, strict=True):
                curve[name].append(round(value, 4))
            print("  ".join(f"{name} {column[-1]}" for name, column in curve.items()), flush=True)
            since = []
    return model, curve


# --- the picture ---------------------------------------------------------------------------------

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 640, 180, 50, 40, 60
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 }
.back { fill: #fff } line { stroke: #999 } polyline { fill: none; stroke-width: 2 }
polyline.a { stroke: #1b6ca8 } text.a { fill: #1b6ca8 }
polyline.b { stroke: #c2571a } text.b { fill: #c2571a }
@media (prefers-color-scheme: dark) {
  text { fill: #eee } .back { fill: #16181b }
  polyline.a { stroke: #5bb0ec } text.a { fill: #5bb0ec }
  polyline.b { stroke: #f0975f } text.b { fill: #f0975f }
}
"""


def picture(curve: Curve) -> str:
    """The losses, and below them the heads, as SVG in light and dark."""
    steps, (first_time, again, previous, induction) = curve["step"], list(curve.values())[1:]
    losses = {"characters seen for the first time": first_time, "again": again}
    heads = {"previous-token head, layer 0": previous, "induction head, layer 1": induction}
    second = TOP + PANEL_HEIGHT + GAP
    width, height = LEFT + PANEL_WIDTH + 20, second + PANEL_HEIGHT + 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>How the tiny model learned</title><style>{STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *panel("Loss in nats, by step", steps, losses, TOP, 6.0),
            *panel("Weight on the right character, by step", steps, heads, second, 1.0),
            "</svg>\n",
        ]
    )


def panel(
    title: str, steps: list[float], lines: dict[str, list[float]], top: int, highest: float
) -> list[str]:
    bottom, right = top + PANEL_HEIGHT, LEFT + PANEL_WIDTH

    def x(step: float) -> float:
        return LEFT + PANEL_WIDTH * step / steps[-1]

    def y(value: float) -> float:
        return bottom - PANEL_HEIGHT * value / highest

    marks = [
        text(x(step), bottom + 16, f"{step:.0f}", "middle") for step in np.linspace(0, steps[-1], 7)
    ] + [
        text(LEFT - 6, y(value) + 4, f"{value:.1f}", "end") for value in (0.0, highest / 2, highest)
    ]
    drawn = [text(LEFT, top - 16, title, "start", "title")]
    for i, (name, values) in enumerate(lines.items()):
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in zip(steps, values, strict=True))
        drawn.append(f'<polyline class="{"ab"[i]}" points="{points}"/>')
        drawn.append(text(right, top - 18 + 15 * i, name, "end", "ab"[i]))
    return [
        f'<line x1="{LEFT}" x2="{LEFT}" y1="{top}" y2="{bottom}"/>',
        f'<line x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>',
        *marks,
        *drawn,
    ]


def text(x: float, y: float, said: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{said}</text>'


def as_json(curve: Curve) -> str:
    """A column a line."""
    columns = ",\n".join(f"  {json.dumps(name)}: {json.dumps(curve[name])}" for name in COLUMNS)
    return f"{{\n{columns}\n}}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--into", type=Path, default=Path(), help="folder to write to")
    options = parser.parse_args()
    qkv.set_num_threads(1)  # rows of 64 are too short to share, above all beside other work
    model, curve = train(options.steps)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    (options.into / "tiny.safetensors").write_bytes(save(weights))
    (options.into / "tiny_loss.json").write_text(as_json(curve), encoding="utf-8")
    (options.into / "tiny_loss.svg").write_text(picture(curve), encoding="utf-8")
    print(f"{sum(w.numel() for w in weights.values())} weights, {time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
