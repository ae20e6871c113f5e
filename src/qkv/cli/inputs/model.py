"""Load a model and a text for the command line, and record the heads of one run.

Weights come from safetensors files only and no code of a model's repository is run. Nothing is
fetched unless that was asked for.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkv.cli.inputs.text import given_text
from qkv.errors import ArgumentError, FileError, QkvError, UnsupportedError
from qkv.extras import install_command
from qkv.files.contents import shown
from qkv.inspection.heads.unknown_tokens import unknown_id_of
from qkv.inspection.models.model_record import Keep, ModelRecord
from qkv.inspection.rendering.token_texts import token_texts
from qkv.samples.shipped_models import SHIPPED_MODELS

if TYPE_CHECKING:
    from qkv.lab.sources.source import Source

__all__ = ["about", "inspect_model", "lab_source"]

Progress = Callable[[int, int], None]
SeeValue = Callable[[ModelRecord, Any], None]
"""A function of a record whose newest layer was just added, and of the value of that layer."""

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WEIGHTS_AFTER_ATTENTION = re.compile(r"(^|\.)(\w*pooler|\w*head|classifier|score)\.")
"""Modules behind the attention layers, whose weights checkpoints of other tasks may lack."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "spiece.model", "*.spm")
_MAX_REASON_LENGTH = 300


def inspect_model(
    options: argparse.Namespace,
    progress: Progress,
    keep: Keep = None,
    see: SeeValue | None = None,
) -> ModelRecord:
    """Run the model of `--model` on the text of `--text`; `keep` says whose weights to keep.

    Raises
    ------
    QkvError
        The model or the text cannot be used; the message says why.
    """
    if options.model in SHIPPED_MODELS:
        shipped = SHIPPED_MODELS[options.model]
        text, count = given_text(options), options.tokens
        return shipped.inspect(shipped.load(), text, count, keep=keep, progress=progress, see=see)
    loaded = _load_transformer(options.model, options.download)
    return loaded.run(_chosen_text(options), options.tokens, progress, keep, see).record


def about(options: argparse.Namespace) -> str:
    """What the model of `--model` reads, in a sentence; nothing if that was said with `--text`."""
    if options.text is not None:
        return ""
    if options.model in SHIPPED_MODELS:
        return SHIPPED_MODELS[options.model].about
    return "The model reads a paragraph that comes with qkv."


def lab_source(options: argparse.Namespace, progress: Progress) -> Source:
    """The model of `--model` on its text as a source of the lab, with the weights of all layers."""
    from qkv.lab.sources.shipped import shipped_source

    if options.model in SHIPPED_MODELS:
        return shipped_source(options.model, given_text(options), options.tokens, progress)
    loaded = _load_transformer(options.model, options.download, predicts=True)
    text = _chosen_text(options)
    ran = loaded.run(text, options.tokens, progress, "weights")
    given = None if options.text is None else text
    return _transformer_source(loaded, ran, given, about(options))


def _transformer_source(
    loaded: _Loaded, ran: _ModelRun, text: str | None, about: str = ""
) -> Source:
    from qkv.lab.sources.heads import heads_of_model
    from qkv.lab.sources.source import Source
    from qkv.lab.sources.what_if import transformer_what_if

    model = loaded.model
    intervene = None
    if hasattr(model, "lm_head") or model.get_output_embeddings() is not None:
        intervene = transformer_what_if(model, loaded.tokenizer, ran.ids, ran.room)

    def read(text: str) -> Source:
        again = loaded.run(text, None, lambda done, of: None, "weights")
        return _transformer_source(loaded, again, text)

    heads = heads_of_model(ran.record, about)
    return Source(ran.record.model, heads=heads, intervene=intervene, read=read, text=text)


# --- models of transformers ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _ModelRun:
    """What a model did on a text; `room` is how many tokens it can read."""

    record: ModelRecord
    ids: list[int]
    room: int


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A model that can read texts."""

    name: str
    model: Any
    tokenizer: Any
    config: Any

    def run(
        self,
        text: str,
        count: int | None,
        progress: Progress,
        keep: Keep,
        see: SeeValue | None = None,
    ) -> _ModelRun:
        """Record the model on a text, or on its first `count` tokens."""
        import torch

        import qkv.hf

        ids = self.tokenizer(text, verbose=False)["input_ids"][:count]
        room = _require_room(ids, self.config, self.tokenizer)
        with (
            torch.no_grad(),
            qkv.hf.inspect(self.model, progress=progress, keep=keep) as record,
            qkv.hf.observe(lambda call: see(record, call.value) if see is not None else None),
            _running_errors(type(self.model).__name__),
        ):
            record.unknown_id = unknown_id_of(self.tokenizer)
            self.model(input_ids=torch.tensor([ids]))
        record.model = self.name
        record.texts = token_texts(self.tokenizer, ids)
        return _ModelRun(record, ids, room)


def _chosen_text(options: argparse.Namespace) -> str:
    """The text of `--text`, or a paragraph."""
    text = given_text(options)
    if text is not None:
        return text
    from qkv.samples import real_sample

    return real_sample().paragraph


def _load_transformer(name: str, download: bool, predicts: bool = False) -> _Loaded:
    """A model; `predicts` asks for its head for the next token, if it has one."""
    _require_safetensors(name)
    with _offline(not download):
        try:
            import torch  # noqa: F401  named in the error if it is missing
            import transformers

            import qkv.hf  # noqa: F401  registers with transformers before a model is made
        except ImportError as error:
            raise UnsupportedError(
                f"--model needs torch and transformers, and {error.name} is not installed.",
                action=f"{install_command('hf')}, or --model language, which needs neither.",
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with _loading_errors(name, download):
            config, tokenizer, model = _load_model(name, download, predicts)
    return _Loaded(name, model, tokenizer, config)


def _require_safetensors(name: str) -> None:
    """A folder with weights in safetensors, or what can be a name on the hub."""
    folder, quoted = Path(name), shown(name)
    if not os.path.exists(name):
        if not _NAME.fullmatch(name) or "--" in name or ".." in name:
            raise ArgumentError(
                f"{quoted} is neither a folder nor a possible name of a model.",
                action="Pass a folder, a name such as openai-community/gpt2, tiny or language.",
            )
        return
    if not folder.is_dir():
        raise FileError(f"{quoted} is a file.", action="Pass the folder that it is in.")
    if not (folder / "config.json").is_file():
        raise FileError(
            f"{quoted} has no config.json.", action="Pass a folder that save_pretrained wrote."
        )
    if not any(folder.glob("*.safetensors")):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        raise FileError(
            f"{quoted} has no safetensors file.",
            [("found", f"{file}, a pickle, which could run code") for file in others[:3]],
            "Save the model with save_pretrained, which writes safetensors.",
        )


@contextmanager
def _offline(offline: bool) -> Iterator[None]:
    """No request to the hub inside, also none of those that loading from a folder makes."""
    variables = {
        "DISABLE_SAFETENSORS_CONVERSION": "1",
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    # huggingface_hub reads the variable once, when it is first imported.
    hub: Any = sys.modules.get("huggingface_hub.constants")
    was_offline = getattr(hub, "HF_HUB_OFFLINE", False)
    if hub is not None and offline:
        hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        if hub is not None:
            hub.HF_HUB_OFFLINE = was_offline
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _load_model(name: str, download: bool, predicts: bool) -> tuple[Any, Any, Any]:
    """Configuration, tokenizer and the part of the model that reads text."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    safe = {"local_files_only": not download, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(name, **safe)
    config.use_cache = False
    tokenizer = _load_tokenizer(name, safe)
    made = [str(name) for name in getattr(config, "architectures", None) or ()]
    predicts = predicts and any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in made)
    kind: Any = AutoModelForCausalLM if predicts else AutoModel
    whole, report = kind.from_pretrained(
        name, config=config, use_safetensors=True, output_loading_info=True, **safe
    )
    model = whole.get_encoder() if getattr(config, "is_encoder_decoder", False) else whole
    read = set(model.parameters())
    _require_weights(
        name,
        sorted(
            key
            for key, weight in whole.named_parameters(remove_duplicate=False)
            if key in report["missing_keys"]
            and weight in read
            and not _WEIGHTS_AFTER_ATTENTION.search(key)
        ),
    )
    return config, tokenizer, model.eval()


def _load_tokenizer(name: str, safe: dict[str, Any]) -> Any:
    """The tokenizer, whose absence transformers reports in the words of whatever it tried last."""
    from transformers import AutoTokenizer

    folder = Path(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **safe)
    except Exception as error:
        if "trust_remote_code" in str(error) or not _lacks(folder, _TOKENIZER_FILES):
            raise
        raise _no_tokenizer(name) from error
    # Without its files, transformers makes a tokenizer of some families that knows no word.
    own = tuple(getattr(tokenizer, "vocab_files_names", {}).values())
    if own and _lacks(folder, own + _TOKENIZER_FILES):
        raise _no_tokenizer(name)
    return tokenizer


def _lacks(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Whether this is a folder without any of these files."""
    return folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in patterns)


def _no_tokenizer(name: str) -> FileError:
    return FileError(
        f"{shown(name)} has no tokenizer, so a text cannot be turned into its tokens.",
        [("looked for", ", ".join(_TOKENIZER_FILES))],
        "Write it beside the model: tokenizer.save_pretrained(folder).",
    )


def _require_weights(name: str, missing: list[str]) -> None:
    """Raise an error if a weight is in no file, since transformers would make it random."""
    if missing:
        raise FileError(
            f"{shown(name)} lacks {len(missing)} of the model's weights; random ones would stand "
            "in for them.",
            [("missing", key) for key in missing[:3]],
            "Pass a folder with all weights of the model that config.json describes.",
        )


@contextmanager
def _loading_errors(name: str, download: bool) -> Iterator[None]:
    """Turn any error of loading a model into an error of this package."""
    quoted = shown(name)
    try:
        yield
    except QkvError:
        raise
    except Exception as error:
        # Many libraries read the files, and their errors have no common base class.
        reason = _first_line(error)
        if "trust_remote_code" in str(error):
            raise UnsupportedError(
                f"{quoted} needs code from its own repository, which is never run here.",
                action="Use a model that transformers itself knows.",
            ) from error
        if isinstance(error, OSError) and not Path(name).is_dir() and not download:
            raise FileError(
                f"{quoted} is not a folder, and there is no model of that name on this machine.",
                action="Add --download to fetch it, or use --model language.",
            ) from error
        raise FileError(
            f"{quoted} cannot be loaded: {reason}", action="Check the files of the model."
        ) from error


@contextmanager
def _running_errors(name: str) -> Iterator[None]:
    try:
        yield
    except QkvError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"{name} cannot read a text alone: {_first_line(error)}",
            action="Inspect it from Python: with qkv.hf.inspect(model): model(**inputs).",
        ) from error


def _first_line(error: Exception) -> str:
    """The first line of the message of another library."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0][:_MAX_REASON_LENGTH]


def _require_room(ids: list[int], config: Any, tokenizer: Any) -> int:
    """The positions of the model; raise an error if the text has more tokens."""
    if not ids:
        raise ArgumentError("the text has no tokens.", action="Write a sentence into it.")
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    room = min(positions or tokenizer.model_max_length, tokenizer.model_max_length)
    if len(ids) > room:
        raise ArgumentError(
            f"the text has {len(ids)} tokens; the model has {room} positions.",
            action=f"Add --tokens {room} to read the beginning.",
        )
    return int(room)
