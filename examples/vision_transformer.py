"""A vision transformer learns to name the colour of a small disc, and shows where it looked.

Pictures are noise with one coloured disc somewhere. A transformer over patches is trained through
qkv for some seconds; then `qkv.inspect` says how much weight its class token gives to each patch,
and a page shows those weights as frames on the pictures.

`python examples/vision_transformer.py` writes vision_transformer.svg.
"""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import qkv

SIZE, PATCH, WIDTH, HEADS, BATCH = 32, 4, 32, 4, 64
GRID = SIZE // PATCH
COLOURS = torch.tensor([[0.9, 0.2, 0.2], [0.2, 0.7, 0.3], [0.2, 0.4, 0.9], [0.9, 0.8, 0.2]])


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (count, 3, SIZE, SIZE), the number of each disc's colour, and its centre."""
    noise = torch.rand(count, 3, SIZE, SIZE, generator=generator) * 0.5 + 0.25
    colour = torch.randint(len(COLOURS), (count,), generator=generator)
    centre = torch.randint(4, SIZE - 4, (count, 2), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    y, x = (centre[:, n, None, None] for n in (0, 1))
    inside = ((rows - y) ** 2 + (columns - x) ** 2 <= 9)[:, None]
    return torch.where(inside, COLOURS[colour][:, :, None, None], noise), colour, centre


class Transformer(nn.Module):
    """One layer: patches and a class token, which alone is read out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(GRID * GRID, WIDTH) * 0.02)
        self.class_token = nn.Parameter(torch.randn(WIDTH) * 0.02)
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(COLOURS)))

    def operands(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, (batch, HEADS, 1 + patches, head_dim)."""
        patches = self.patches(images).flatten(2).mT + self.positions
        first = self.class_token.expand(len(images), 1, WIDTH)
        rows = self.norm(torch.cat([first, patches], 1))
        q, k, v = self.project(rows).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, images: Tensor) -> Tensor:
        q, k, v = self.operands(images)
        seen = qkv.attention(q[:, :, :1], k, v)
        return self.head(self.class_token + self.out(seen.transpose(1, 2).flatten(2))[:, 0])


def train(steps: int) -> tuple[Transformer, float]:
    """A trained model, and the share of new pictures that it gets right."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        images, colour, _ = pictures(BATCH, generator)
        loss = nn.functional.cross_entropy(model(images), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images, colour, _ = pictures(256, generator)
    with torch.no_grad():
        return model, (model(images).argmax(1) == colour).float().mean().item()


def patch_weights(model: Transformer, images: Tensor) -> Tensor:
    """What the class token gives to each patch in all heads, as shares, (batch, GRID, GRID)."""
    record = qkv.inspect(*model.operands(images))
    weights = torch.as_tensor(record.weights[:, :, 0, 1:]).sum(1)
    return (weights / weights.sum(1, keepdim=True)).unflatten(1, (GRID, GRID))


def png(image: Tensor) -> bytes:
    """A picture (3, height, width) as a file."""
    pixels = (image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def drawing(images: Tensor, weights: Tensor, scale: int = 6) -> str:
    """The pictures side by side, each patch framed the more heavily the more weight it has."""
    side, gap = SIZE * scale, 16
    parts = []
    for n, (image, weight) in enumerate(zip(images, weights, strict=True)):
        left = gap + n * (side + gap)
        data = base64.b64encode(png(image)).decode()
        parts.append(
            f'<image x="{left}" y="{gap}" width="{side}" height="{side}" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
        )
        cell = PATCH * scale
        for row in range(GRID):
            for column in range(GRID):
                share = weight[row, column].item()
                if share < 0.03:
                    continue
                parts.append(
                    f'<rect x="{left + column * cell}" y="{gap + row * cell}" width="{cell}" '
                    f'height="{cell}" fill="none" stroke="white" stroke-opacity="{share**0.5:.2f}" '
                    f'stroke-width="3"><title>{share:.1%} of the weight</title></rect>'
                )
    width, height = gap + len(images) * (side + gap), side + 2 * gap + 24
    label = "Weight that the class token gives to each patch: the brighter a frame, the more."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}"><rect width="100%" height="100%" fill="#111"/>'
        f"{''.join(parts)}"
        f'<text x="{gap}" y="{height - 14}" fill="#eee" font-family="sans-serif" '
        f'font-size="15">{label}</text></svg>\n'
    )


def main(steps: int = 300, path: str = "vision_transformer.svg") -> tuple[float, float]:
    """The share of pictures that are right, and the mean weight on patches of the disc."""
    model, right = train(steps)
    images, _, centre = pictures(4, torch.Generator().manual_seed(1))
    with torch.no_grad():
        weights = patch_weights(model, images)
    Path(path).write_text(drawing(images, weights), encoding="utf-8")
    middle = (torch.arange(GRID) + 0.5) * PATCH
    away = (middle[:, None] - centre[:, 0, None, None]) ** 2 + (
        middle - centre[:, 1, None, None]
    ) ** 2
    on_disc = (weights * (away <= 25)).sum((1, 2)).mean().item()
    print(f"{right:.0%} of new pictures right; {on_disc:.0%} of the weight on the disc; see {path}")
    return right, on_disc


if __name__ == "__main__":
    main()
