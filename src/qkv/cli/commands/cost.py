"""`qkv cost`: what a model, or a mechanism, costs at a context length."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from qkv.cli.given import is_given

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from qkv.cost import Ledger, Machine, MechanismCost, ModelCost
    from qkv.inspection.summaries.terminal import Page

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = (
    "Operations, parameters, bytes moved, score-matrix bytes avoided, KV cache, operations for "
    "each byte and the least time on some machines, of each layer and in all, counted from sizes. "
    "Bytes are the least that must move. Without a name: every model that has a card."
)

_SHOWN = "h100", "h200", "mi300x", "m4"
_UNITS = {"y": 31_557_600, "d": 86_400, "h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="NAME", help="a model whose sizes are published")
    what.add_argument("--config", metavar="FILE", help="a Hugging Face config.json, or its folder")
    what.add_argument("--mechanism", metavar="NAME", help="a mechanism of qkv.mechanisms")
    parser.add_argument(
        "--context", type=int, metavar="N", help="tokens (default: the model's, and 1k to 10M)"
    )
    parser.add_argument(
        "--source",
        type=int,
        metavar="N",
        help="tokens that an encoder reads (default: the model's)",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    parser.add_argument("--dtype", metavar="T", help="default bfloat16; float32 for mechanisms")
    parser.add_argument("--steps", action="store_true", help="every step, with its closed form")
    parser.add_argument(
        "--machine", metavar="NAME", help="h100, h200, mi300x, m4, or here, which is measured"
    )
    spread = parser.add_argument_group("a model whose sequence is spread over ranks")
    spread.add_argument("--ranks", type=int, metavar="N", help="processes that share the sequence")
    spread.add_argument("--link", type=float, metavar="GB/S", help="of each rank (default 50)")
    spread.add_argument("--order", metavar="O", help="zigzag (default), contiguous or striped")
    parser.add_argument("--json", action="store_true", help="strict JSON")


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    from qkv.cost import machine
    from qkv.errors import ArgumentError

    machines = [machine(name) for name in ([options.machine] if options.machine else _SHOWN)]
    if options.source is not None and options.model is None and options.config is None:
        raise ArgumentError(
            "--source is for a model with an encoder.", action="Leave it out, or pass --config."
        )
    _refuse_what_is_ignored(options)
    if options.ranks is not None:
        return _ranks(options)
    if options.mechanism is not None:
        return _mechanism(options, machines)
    if options.model is None and options.config is None:
        if options.steps:
            raise ArgumentError(
                "--steps shows those of one model or mechanism, and none is named.",
                action="Add --model, --config or --mechanism.",
            )
        return _overview(options, machines)
    return _model(options, machines)


def _refuse_what_is_ignored(options: argparse.Namespace) -> None:
    from qkv.errors import ArgumentError

    names, action = ("steps", "source"), "Leave it out."
    fact = "does not go with --ranks, which counts attention over ranks alone."
    if options.ranks is None:
        names, action = ("link", "order"), "Add --ranks, or leave it out."
        fact = "is of a sequence that is spread over ranks; there are none."
    for name in names:
        if is_given(getattr(options, name)):
            raise ArgumentError(f"--{name} {fact}", action=action)


def _model(options: argparse.Namespace, machines: list[Machine]) -> str:
    from qkv.cost import CONTEXTS, model_card, model_cost, read_config

    model = model_card(options.model) if options.config is None else read_config(options.config)
    same: dict[str, Any] = {"batch": options.batch, "dtype": options.dtype or "bfloat16"}
    same["source"] = options.source

    def pair(context: int | None) -> tuple[ModelCost, ModelCost | None]:
        one = model_cost(model, context, decode=True, **same) if model.causal else None
        return model_cost(model, context, **same), one

    whole, decoding = pair(options.context)
    others = [pair(context) for context in CONTEXTS] if options.context is None else []
    if options.json:
        costs = {
            "cost": whole.to_dict(),
            "decode": decoding.to_dict() if decoding else None,
            "machines": [_machine_dict(m, whole, decoding) for m in machines],
            "contexts": [
                {
                    "cost": all_tokens.to_dict()["whole"] | {"context": all_tokens.context},
                    "decode": one.to_dict()["whole"] if one else None,
                    "machines": [_machine_dict(m, all_tokens, one) for m in machines],
                }
                for all_tokens, one in others
            ],
        }
        return _json(costs)
    return _shown(options, machines, whole, decoding, others)


def _ranks(options: argparse.Namespace) -> str:
    from rich.text import Text

    from qkv.cost import model_card, ranks_cost, read_config
    from qkv.errors import ArgumentError
    from qkv.inspection.summaries.terminal import Page

    if options.model is None and options.config is None:
        raise ArgumentError(
            "--ranks spreads the sequence of a model, and none is named.",
            action="Add --model or --config.",
        )
    link = 50.0 if options.link is None else options.link
    if not 0 < link < math.inf:
        raise ArgumentError(
            f"--link {link:g} is not a number of GB/s above 0.", action="Pass one, such as 50."
        )
    model = model_card(options.model) if options.config is None else read_config(options.config)
    cost = ranks_cost(
        model, options.context, options.ranks,
        batch=options.batch, dtype=options.dtype or "bfloat16",
        machine=options.machine or "h100", link_bandwidth=link * 1e9,
        order=options.order or "zigzag",
    )  # fmt: skip
    if options.json:
        return _json(cost.to_dict())
    page = Page()
    table = page.table("strategy", ">received", ">held", ">balance", ">time", ">efficiency")
    refused = []
    for name, of in cost.strategies.items():
        if of.refusal:
            refused.append(Text(f"{name}: {of.refusal}"))
            continue
        table.add_row(
            name, _bytes(of.received), _bytes(of.held), f"{of.balance:.3f}",
            _seconds(of.seconds), f"{of.efficiency:.1%}",
        )  # fmt: skip
    rate = _number(int(cost.operations_per_second))
    return page.render(
        Text(
            f"{page.token(model.name, 200)}: {cost.context:,} tokens, batch {cost.batch}, "
            f"{cost.dtype}, {cost.ranks:,} ranks in {cost.order} order",
            style="bold",
        ),
        Text(
            f"Attention of all layers, forward; each rank computes {rate} operations a second "
            f"({cost.machine}) and receives {link:g} GB/s"
        ),
        table,
        *refused,
    )


def _shown(
    options: argparse.Namespace,
    machines: list[Machine],
    whole: ModelCost,
    decoding: ModelCost | None,
    others: list[tuple[ModelCost, ModelCost | None]],
) -> str:
    from rich.text import Text

    from qkv.inspection.summaries.terminal import Page

    page, model = Page(), whole.model
    name = page.token(model.name, 200) + (" (speculative)" if model.speculative else "")
    head = f"{name}: {whole.context:,} tokens, batch {whole.batch}, {whole.dtype}"
    parts: list[RenderableType] = [Text(head, style="bold")]
    longest = max([whole, *(cost for cost, _ in others)], key=lambda cost: cost.context)
    parts += [Text(page.token(line, 400)) for line in (model.source, *longest.notes) if line]
    active = whole.active_parameters
    parts.append(
        Text(
            f"{whole.parameters:,} parameters"
            + (f", {active:,} of them for each token" if active != whole.parameters else "")
            + f"; {_bytes(whole.kv_cache_bytes)} of KV cache"
        )
    )
    parts += [Text("\nAll tokens at once"), _layers(page, whole)]
    if decoding is not None:
        parts += [Text("\nOne more token of each sequence"), _layers(page, decoding)]
    parts += [Text("\nLeast time"), _times(page, machines, whole, decoding)]
    if others:
        parts += [Text("\nOther contexts"), _contexts(page, machines[0], others)]
    if options.steps:
        for layer in whole.layers:
            parts += [Text(f"\nSteps of one layer of {layer.kind}"), _steps(page, layer.ledger)]
    return page.render(*parts)


def _layers(page: Page, cost: ModelCost) -> Table:
    table = page.table(
        ">layers", "each", ">ops", ">params", ">moved", ">ops/byte", ">scores avoided", ">KV cache",
    )  # fmt: skip

    def row(count: str, kind: str, ledger: Ledger, scores: int, cache: int) -> None:
        moved = int(ledger.bytes_moved)
        intensity = f"{int(ledger.total) / moved:.1f}" if moved else ""
        table.add_row(
            count,
            kind,
            _number(int(ledger.total)),
            _number(int(ledger.parameters)),
            _bytes(moved),
            intensity,
            _bytes(scores) if scores else "",
            _bytes(cache) if cache else "",
        )

    for layer in cost.layers:
        scores, cache = int(layer.score_bytes), int(layer.kv_cache_bytes)
        row(str(layer.count), layer.kind, layer.ledger, scores, cache)
    if cost.outside.total or cost.outside.parameters:
        row("", "the rest", cost.outside, 0, 0)
    row("", "whole model", cost.ledger, cost.score_bytes, cost.kv_cache_bytes)
    return table


def _times(
    page: Page, machines: list[Machine], whole: ModelCost, decoding: ModelCost | None
) -> Table:
    table = page.table("machine", ">all tokens", "bound by", ">one more token", "bound by")
    for machine in machines:
        cells = [machine.name + (" (estimated peak)" if machine.estimated else "")]
        for cost in (whole, decoding):
            time = cost.roofline(machine) if cost else None
            none = f"no {whole.dtype} peak" if cost else ""
            cells += [_seconds(time.seconds), time.bound] if time else [none, ""]
        table.add_row(*cells)
    return table


def _contexts(
    page: Page, machine: Machine, others: list[tuple[ModelCost, ModelCost | None]]
) -> Table:
    table = page.table(
        ">context", ">operations", ">moved", ">scores avoided", ">KV cache",
        f">{machine.name}", ">one more token",
    )  # fmt: skip
    for whole, one in others:
        times = [cost.roofline(machine) if cost else None for cost in (whole, one)]
        table.add_row(
            f"{whole.context:,}",
            _number(whole.operations),
            _bytes(whole.bytes_moved),
            _bytes(whole.score_bytes),
            _bytes(whole.kv_cache_bytes),
            *(_seconds(time.seconds) if time else "" for time in times),
        )
    return table


def _steps(page: Page, ledger: Ledger) -> Table:
    table = page.table("step", ">operations", "closed form", ">numbers left", "closed form")
    for name, count in ledger.steps.items():
        space = ledger.space.get(name)
        left = (_number(int(space)), space.formula) if space is not None else ("", "")
        table.add_row(name, _number(int(count)), count.formula, *left)
    table.add_row("all", _number(int(ledger.total)), ledger.total.formula, "", "")
    return table


def _mechanism(options: argparse.Namespace, machines: list[Machine]) -> str:
    from rich.text import Text

    from qkv.cost import mechanism_cost
    from qkv.inspection.summaries.terminal import Page
    from qkv.mechanisms.background import background

    context = 5 if options.context is None else options.context
    cost: MechanismCost = mechanism_cost(
        options.mechanism, context, batch=options.batch, dtype=options.dtype or "float32"
    )
    if options.json:
        times = {m.name: cost.roofline(m) for m in machines}
        by_machine = {name: time._asdict() if time else None for name, time in times.items()}
        return _json({**cost.to_dict(), "machines": by_machine})
    page, ledger = Page(), cost.ledger
    moved = int(ledger.bytes_moved)
    parts: list[RenderableType] = [
        Text(f"{cost.name}: {context:,} tokens, batch {cost.batch}, {cost.dtype}", style="bold"),
        Text(cost.formula),
        Text(cost.paper),
        Text(
            f"{int(ledger.parameters):,} parameters; {_bytes(moved)} moved, "
            f"{cost.intensity:.1f} operations for each byte; the scores of all pairs would take "
            f"{_bytes(cost.score_bytes)}\n"
        ),
        _steps(page, ledger),
    ]
    kinds = ", ".join(f"{int(count):,} {kind}" for kind, count in ledger.kinds.items())
    timed = [(m.name, cost.roofline(m)) for m in machines]
    least = ", ".join(f"{name} {_seconds(t.seconds)} ({t.bound})" for name, t in timed if t)
    sizes = ", ".join(f"{name} = {size}" for name, size in background(cost.name).sizes.items())
    parts += [Text(f"\nHere {sizes}."), Text(f"{int(ledger.total):,} operations: {kinds}")]
    parts.append(Text(f"Least time: {least}"))
    return page.render(*parts)


def _overview(options: argparse.Namespace, machines: list[Machine]) -> str:
    """Every model with a card, at its own longest context."""
    from rich.text import Text

    from qkv.cost import model_cost, model_names
    from qkv.inspection.summaries.terminal import Page

    same = {"batch": options.batch, "dtype": options.dtype or "bfloat16"}
    costs = {name: model_cost(name, options.context, **same) for name in model_names()}
    if options.json:
        return _json(
            {
                name: cost.to_dict()
                | {"machines": [_machine_dict(m, cost, None) for m in machines]}
                for name, cost in costs.items()
            }
        )
    page = Page()
    least = machines[0] if options.machine else None
    # The machine replaces two columns, so that names fit into 80 characters.
    some = (">layers", ">scores") if least is None else (f">{least.name}",)
    table = page.table("model", ">context", ">parameters", ">operations", ">KV cache", *some)
    for name, cost in costs.items():
        cells = [str(len(cost.model.layers)), _number(cost.score_entries)]
        if least is not None:
            time = cost.roofline(least)
            cells = [_seconds(time.seconds) if time else f"no {cost.dtype}"]
        table.add_row(
            name + (" (speculative)" if cost.model.speculative else ""),
            f"{cost.context:,}",
            _number(cost.parameters),
            _number(cost.operations),
            _bytes(cost.kv_cache_bytes) if cost.model.causal else "",
            *cells,
        )
    return page.render(table, Text("\nqkv cost --model NAME says more about one of them."))


def _machine_dict(machine: Machine, whole: ModelCost, decoding: ModelCost | None) -> dict[str, Any]:
    times = [cost.roofline(machine) if cost else None for cost in (whole, decoding)]
    all_tokens, one = (time._asdict() if time else None for time in times)
    return {
        "name": machine.name,
        "source": machine.source,
        "estimated": machine.estimated,
        "all_tokens": all_tokens,
        "one_more_token": one,
    }


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _number(value: int) -> str:
    """The number in full below a million, else four digits and M, G (10^9), T, P, E or Z."""
    for power, letter in ((21, "Z"), (18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:.4g} {letter}"
    return f"{value:,}"


def _bytes(value: int) -> str:
    from qkv.cost import memory

    return memory(value)


def _seconds(value: float) -> str:
    value = float(f"{value:.3g}")  # Before the unit is chosen: 0.9997 s are 1 s, not 1e+03 ms.
    for unit, size in _UNITS.items():
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
