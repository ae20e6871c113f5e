"""Every head of a transformers model while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as TextSequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.arrays.torch_arrays import check_loaded
from qkv.errors import ArgumentError, UnsupportedError
from qkv.hf.attention import observe
from qkv.hf.inspection.forward_calls import BackwardAfter, around_forward, in_backward
from qkv.hf.inspection.sequences import CallArguments, Sequence
from qkv.hf.inspection.switching import (
    called_with,
    inner_model,
    is_in_training,
    never_called,
    switched,
    uncompiled,
)
from qkv.hf.inspection.text_inputs import inputs_of_text
from qkv.hf.layer_call import LayerCall
from qkv.hf.positions import can_be_scaled, positions_of, require_positions, warn_beyond
from qkv.hf.sharding.layers import sharding_of
from qkv.hf.sharding.record import ShardRecord
from qkv.hf.usage import SilentLayers, warn_of_silent
from qkv.inspection.heads.unknown_tokens import unknown_id_of
from qkv.inspection.models.model_record import Keep, ModelRecord
from qkv.inspection.rendering.token_texts import token_texts

__all__ = ["inspect"]

Array = NDArray[Any]
Progress = Callable[[int, int], None]

_OWN_MODELS = (
    "Record the layers of an own model with qkv.ModelRecord: record.add(query, key, qkv.Causal(), "
    'name="layer 0") for each of them, as docs/inspect-models.md shows.'
)
_IN_TRAINING = "Some of the model was in training mode, where dropout changes later layers."


@overload
def inspect(
    model: torch.nn.Module,
    *,
    top: int = 4,
    keep: Keep = None,
    progress: Progress | None = None,
) -> AbstractContextManager[ModelRecord]: ...


@overload
def inspect(
    model: torch.nn.Module,
    text: str | TextSequence[str],
    tokenizer: Any,
    *,
    decoder_text: str | None = None,
    top: int = 4,
    keep: Keep = None,
    progress: Progress | None = None,
) -> ModelRecord: ...


def inspect(
    model: torch.nn.Module,
    text: str | TextSequence[str] | None = None,
    tokenizer: Any = None,
    *,
    decoder_text: str | None = None,
    top: int = 4,
    keep: Keep = None,
    progress: Progress | None = None,
) -> AbstractContextManager[ModelRecord] | ModelRecord:
    """Record the scores of every head of a model while it runs once.

        record = qkv.hf.inspect(model, "The cat sat.", tokenizer)

    or, around a call of one's own,

        with qkv.hf.inspect(model) as record:
            model(**inputs)
        record.heads()

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module with one inside
        Loaded with any attention implementation. It is switched to qkv inside the `with`, and
        has its own again afterwards, also after an error. Compiled code is run uncompiled there.
    text : str or sequence of str, optional
        What the model reads, as `tokenizer` turns it into inputs; several texts are one batch. No
        gradients are kept.
    tokenizer : transformers tokenizer, optional
        Goes with `text`.
    decoder_text : str, optional
        For a model of an encoder and a decoder (T5, BART): what the decoder reads after its start
        token, `decoder_start_token_id`. Without it the decoder reads the start token alone.
    top : int
        Keys to keep of each query.
    keep : "weights", layer numbers or None
        Layers whose query and key are kept, so that `record[i].weights` can be read. Numbers count
        from 0; one that no layer has is an error when the model has run.
    progress : callable (done, total), optional
        Told of each layer that is done.

    Returns
    -------
    ModelRecord, or a context manager that gives one
        With a text the record, with its tokens as text; else one that is filled while the model
        runs inside of the `with`. What each score is, `qkv.inspection.heads.head_scores` says.

    Warns
    -----
    UserWarning
        The text has more tokens than the model has positions, and they are not learned.
    NotUsedWarning
        Some attention layers that ran did not call qkv, so that the record lacks them.

    Raises
    ------
    UnsupportedError
        The model computes its attention without asking for an implementation, is not on the CPU,
        or is inspected or changed by another thread; or weights are to be kept of a sequence that
        is spread over ranks.
    ArgumentError
        A text is given without a tokenizer, or a tokenizer without a text; a text has no tokens, or
        more than the model has learned positions; texts of several lengths cannot be padded; the
        configuration does not say what a decoder begins with: give its tokens in the other form,
        `with qkv.hf.inspect(model) as record: model(**inputs, decoder_input_ids=...)`.
        The model is called more than once, or not at all, by the thread that opened the `with`; or
        there is no model of transformers, or more than one.

    Notes
    -----
    Tokens are read from the `input_ids` of the part of the model that a layer is in, padding from
    its `attention_mask`. Without ids (pictures, embeddings), or with a cache of earlier tokens,
    duplicate and induction scores are NaN. So are all scores that compare positions where keys are
    of another sequence than queries, as a layer's arguments show, and where a mask of 4 dimensions
    beside a cache says no positions. What backward computes anew (checkpoints) is not recorded.

    Unknown tokens, `tokenizer.unk_token_id`, are left out of duplicate and induction. Inside of the
    `with`, `record.unknown_id = ...` says which id that is, before the model is called.

    Inside of `qkv.hf.sharded` every rank records its own rows, in the order of its shard: `rows`
    and `top` of its queries, `received` of its keys from all queries, keys by their number in the
    whole sequence. `heads()` is the same on all ranks, of the rows of all. Weights cannot be kept.

    Cost: about five forward passes of attention; memory O(length), the weights are never there.

    Examples
    --------
    >>> import torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> qkv.hf.enable()
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> with qkv.hf.inspect(model) as record:
    ...     output = model(ids)
    >>> record
    ModelRecord('GPT2Model', 1 layer, 2 heads)
    """
    recorded = _recorded(model, top, keep, progress)
    if text is None and tokenizer is None and decoder_text is None:
        return recorded
    if text is None or tokenizer is None:
        missing = "text" if text is None else "tokenizer"
        raise ArgumentError(
            f"a text and its tokenizer go together, and there is no {missing}.",
            action="Pass both, or neither and call the model inside of the with.",
        )
    if not callable(tokenizer) or isinstance(tokenizer, type):
        raise ArgumentError(
            f"tokenizer={shown(tokenizer)} is not a tokenizer.",
            action="Pass what AutoTokenizer.from_pretrained returns.",
        )
    inputs = inputs_of_text(inner_model(model, _OWN_MODELS), text, tokenizer, decoder_text)
    with torch.no_grad(), recorded as record:
        record.unknown_id = unknown_id_of(tokenizer)
        called_with(model, inputs)(**inputs)
    record.texts = token_texts(tokenizer, inputs["input_ids"][0].tolist())
    if "decoder_input_ids" in inputs:
        record.decoder_texts = token_texts(tokenizer, inputs["decoder_input_ids"][0].tolist())
    return record


@contextmanager
def _recorded(
    model: torch.nn.Module, top: int, keep: Keep, progress: Progress | None
) -> Iterator[ModelRecord]:
    from qkv.hf import enable

    enable()
    model = inner_model(model, _OWN_MODELS)
    _require_cpu(model)
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    sharding = sharding_of(model)
    if sharding is None:
        record = ModelRecord(name, top=top, keep=keep)
    else:
        record = ShardRecord(name, sharding, top=top, keep=keep)
    after = BackwardAfter("qkv.hf.inspect", model)
    run = _Run(model, record, progress, after)
    with (
        switched(model) if sharding is None else nullcontext(),
        uncompiled(),
        around_forward([model], run.around),
        run.arguments.followed(),
        run.silent.followed(),
        observe(run.see) if sharding is None else sharding.observed(run.see),
    ):
        try:
            yield record
        finally:
            after.has_ended = True
        run.require_layers()
    record.require_kept()
    warn_of_silent(model, run.silent.names, len(record))


@dataclass(slots=True)
class _Run:
    """One run of a model: what it is called with, and the layers that have been seen."""

    model: torch.nn.Module
    record: ModelRecord
    progress: Progress | None
    after: BackwardAfter
    names: dict[torch.nn.Module, str] = field(init=False)
    arguments: CallArguments = field(init=False)
    silent: SilentLayers = field(init=False)
    inputs: Mapping[str, Any] | None = None
    thread: int = field(default_factory=get_ident)
    is_running: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.names = {module: name for name, module in self.model.named_modules()}
        self.arguments = CallArguments(self.model, self.names)
        self.silent = SilentLayers(self.names)

    @contextmanager
    def around(
        self, module: torch.nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> Iterator[Any]:
        """One call of the model by this thread; what others run meanwhile is not recorded."""
        if in_backward() or get_ident() != self.thread:
            yield
            return
        self.begin(module, args, inputs)
        # Not by a hook alone: a caller of `forward` itself runs none.
        self.arguments.enter(module, args, inputs)
        self.is_running = True
        try:
            yield self.after.watch
        finally:
            self.is_running = False

    def begin(
        self, module: torch.nn.Module, args: tuple[Any, ...], inputs: Mapping[str, Any]
    ) -> None:
        """Read the inputs of the only call."""
        if self.inputs is not None:
            raise ArgumentError(
                f"{type(module).__name__} was called twice; a record is of one call.",
                action="Open one `with qkv.hf.inspect(model)` for each call; for generated text, "
                "call the model once on all of it.",
            )
        self.inputs = {"input_ids": args[0], **inputs} if args else inputs
        if is_in_training(self.model):
            self.record.notes.append(_IN_TRAINING)
        self.record.tokens = ids = self._given("input_ids")
        self._check_length(ids)

    def _check_length(self, ids: Array | None) -> None:
        """Refuse a text without tokens, or with more than learned positions; warn of others."""
        if ids is None:
            return
        if not ids.size:
            raise ArgumentError("the text has no tokens.", action="Pass a sentence.")
        config, count = getattr(self.model, "config", None), ids.shape[1]
        places = self._given("position_ids")
        if places is not None:
            count = int(places.max(initial=-1)) + 1  # Packed texts each begin at 0.
        else:
            require_positions(self.model, count)
            answers = self._given("decoder_input_ids")
            if answers is not None:
                require_positions(self.model, answers.shape[1], decoder=True)
        if (positions := positions_of(config)) is not None and count > positions:
            warn_beyond(count, positions, can_be_scaled(config))

    def see(self, call: LayerCall) -> None:
        """Add the scores of one layer, before its output is computed."""
        if get_ident() != self.thread:
            return
        self.silent.called()
        name = self.names.get(call.module)
        if name is None or not self.is_running or in_backward():
            return
        same = self.arguments.same_sequence(call.module)
        sequence, comparable = self.arguments.sequence_of(call.module), same and call.has_positions
        ids, real = self._rows_of(sequence, call) if comparable else (None, None)
        real_queries = None
        if not same:
            real = _real_rows(self.arguments.mask_of_other_keys(call.module), call.key)
            real_queries = _real_rows(sequence.real, call.query)
        self.seen[name] += 1
        repeat = f" ({self.seen[name]})" if self.seen[name] > 1 else ""
        self.record.add(
            call.query.detach(),
            call.key.detach(),
            *call.variants,
            name=name + repeat,
            tokens=ids,
            real=real,
            real_queries=real_queries,
            scale=call.scale,
            q_offset=call.q_offset,
            kv_offset=call.kv_offset,
            one_sequence=comparable,
            sequences=(sequence.name, sequence.name if same else self._keys_of(call)),
        )
        if self.progress is not None:
            self.progress(len(self.record), max(len(self.record), self._attention_layers()))

    def require_layers(self) -> None:
        """Complain of a model that did not run, or went its own way."""
        name = type(self.model).__name__
        if self.inputs is None:
            raise ArgumentError(
                f"{name} was not called inside the `with`, by the thread that opened it.",
                action="Call it there, model(**inputs), or pass the inner model that was called.",
            )
        if not self.record.layers:
            raise never_called(self.model, "nothing was seen")

    def _rows_of(self, sequence: Sequence, call: LayerCall) -> tuple[Array | None, Array | None]:
        """Token ids and padding of a layer's keys, None where the inputs do not say them."""
        (batch, _, q_len, _), kv_len = call.query.shape, call.key.shape[2]
        ids, real = sequence.ids, sequence.real
        if ids is not None and (ids.shape != (batch, q_len) or call.q_offset or q_len > kv_len):
            # Ids of another part of the model, or only the last ones while a cache holds the rest.
            ids = None
        if real is not None and real.shape != (batch, call.q_offset + q_len):
            real = None
        if real is not None:
            real = _filled(real[:, call.kv_offset :] != 0, kv_len, False)
        return None if ids is None else _filled(ids, kv_len, 0), real

    def _keys_of(self, call: LayerCall) -> str | None:
        """Which input the keys of a layer of two sequences are, if its length says so."""
        config, ids = getattr(self.model, "config", None), self._given("input_ids")
        both = getattr(config, "is_encoder_decoder", False)
        return (
            "input_ids" if both and ids is not None and ids.shape[1] == call.key.shape[2] else None
        )

    def _given(self, name: str) -> Array | None:
        """An input (batch, length), if there is one of that kind."""
        given = (self.inputs or {}).get(name)
        if not isinstance(given, torch.Tensor) or given.ndim != 2:
            return None
        return np.asarray(given.detach().cpu().numpy())

    def _attention_layers(self) -> int:
        return sum("Attention" in type(module).__name__ for module in self.names)


def _require_cpu(model: torch.nn.Module) -> None:
    check_loaded(model, model.parameters())
    elsewhere = {str(p.device) for p in model.parameters() if p.device.type != "cpu"}
    if elsewhere:
        raise UnsupportedError(
            f"{type(model).__name__} is on {', '.join(sorted(elsewhere))}; scores of heads are "
            "computed on the CPU.",
            action="Pass model.cpu().",
        )


def _real_rows(mask: Array | None, rows: torch.Tensor) -> Array | None:
    """Which rows (batch, heads, n, head_dim) are not padding, by a mask with an entry for each."""
    batch, _, count, _ = rows.shape
    return None if mask is None or mask.shape != (batch, count) else mask != 0


def _filled(rows: Array, length: int, fill: Any) -> Array:
    """Rows (batch, n) for `length` keys; what a static cache does not hold yet is `fill`."""
    missing = max(length - rows.shape[1], 0)
    return np.pad(rows[:, :length], ((0, 0), (0, missing)), constant_values=fill)
