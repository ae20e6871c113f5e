"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv._dynamo import made_outside
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import array_shape
from qkv.errors import ArgumentError
from qkv.positions import hf_config, scaling
from qkv.positions.rotation import array_namespace, rotate
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant

Array = NDArray[Any]
Pairs: TypeAlias = Literal["half_split", "interleaved"]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RoPE(Variant):
    """Rotate pairs of entries of each query and key row by an angle that grows with position.

    Parameters
    ----------
    base : float
        Pair i of n turns by `position * base ** (-i / n)` radians.
    layout : "half_split" or "interleaved"
        Pair i is entries (i, i + n) (GPT-NeoX, Llama in Hugging Face), or (2 i, 2 i + 1) (the
        paper, GPT-J).
    rotary_dim : int, optional
        Number of leading entries to rotate, even; all by default.
    inv_freq : array (rotary_dim / 2,), optional
        Radians per position of each pair, instead of `base`.
    attention_factor : float
        Multiplies the rotated entries of query and key, so that their part of the score is
        multiplied by its square. transformers multiplies cos and sin by it.

    Raises
    ------
    ArgumentError
        If the layout is unknown, or a number is not positive or not even.

    Notes
    -----
    `R(q_i) . R(k_j)` depends on `q_pos - kv_pos` alone. `linear`, `ntk_aware`, `dynamic_ntk`,
    `yarn`, `llama3` and `longrope` make the `inv_freq` of contexts longer than those of training,
    `from_hf_config` reads them from the configuration of a model. Cost: one pass over query and
    key. Source: Su et al., "RoFormer" (2021), equation 15.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 5, 8))
    >>> rope, positions = qkv.RoPE(), np.arange(5)
    >>> rotated = rope.rotate(q, positions), rope.rotate(k, positions)
    >>> bool(np.allclose(qkv.attention(*rotated, v), qkv.attention(q, k, v, rope)))
    True
    """

    roles: ClassVar[Mapping[str, Role]] = {"base": "static", "layout": "static"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True
    constant_fields: ClassVar[Mapping[str, str]] = {"inv_freq": "rotate query and key by rotate"}

    base: float = 10000.0
    layout: Pairs = "half_split"
    rotary_dim: int | None = None
    inv_freq: ArrayLike | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str) or self.layout not in ("half_split", "interleaved"):
            action = "Use 'half_split' (Hugging Face Llama) or 'interleaved' (GPT-J)."
            raise ArgumentError(f"RoPE layout={shown(self.layout)} is not known.", action=action)
        scaling.positive("base", self.base)
        scaling.positive("attention_factor", self.attention_factor)
        if self.rotary_dim is not None:
            scaling.checked_rotary_dim(self.rotary_dim)

    @classmethod
    def linear(
        cls, rotary_dim: int, factor: float, *, base: float = 10000.0, layout: Pairs = "half_split"
    ) -> RoPE:
        """Position interpolation: positions divided by `factor`.

        Parameters
        ----------
        rotary_dim : int
            Number of leading entries to rotate: head_dim, if all are.
        factor : float
            How many times as long the context is as in training.
        base, layout
            As for `RoPE`.

        Notes
        -----
        Source: Chen et al., "Extending Context Window via Positional Interpolation" (2023).
        """
        return cls(layout=layout, inv_freq=scaling.linear(rotary_dim, factor, base))

    @classmethod
    def ntk_aware(
        cls, rotary_dim: int, factor: float, *, base: float = 10000.0, layout: Pairs = "half_split"
    ) -> RoPE:
        """`base * factor ** (d / (d - 2))` as base: fast pairs stay, the slowest is interpolated.

        Parameters
        ----------
        rotary_dim, factor, base, layout
            As for `RoPE.linear`; d is rotary_dim.

        Notes
        -----
        Source: bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et al., "YaRN" (2023), section 3.1.
        """
        return cls(layout=layout, inv_freq=scaling.ntk_aware(rotary_dim, factor, base))

    @classmethod
    def dynamic_ntk(
        cls,
        rotary_dim: int,
        factor: float,
        max_position_embeddings: int,
        seq_len: int,
        *,
        base: float = 10000.0,
        layout: Pairs = "half_split",
    ) -> RoPE:
        """`ntk_aware` with the factor that a length asks for, 1 up to the trained length.

            f = factor * max(seq_len, m) / m - (factor - 1),   m = max_position_embeddings

        Parameters
        ----------
        rotary_dim, factor, base, layout
            As for `RoPE.linear`.
        max_position_embeddings : int
            Context length of training, in tokens.
        seq_len : int
            Current length, in tokens: the largest position plus 1. Another length is another RoPE;
            keys that were rotated before they were cached keep the frequencies of that time.

        Notes
        -----
        Source: emozilla, "Dynamically Scaled RoPE" (2023); Peng et al. (2023), section 3.3.
        """
        inv_freq = scaling.dynamic_ntk(rotary_dim, factor, max_position_embeddings, seq_len, base)
        return cls(layout=layout, inv_freq=inv_freq)

    @classmethod
    def yarn(
        cls,
        rotary_dim: int,
        factor: float,
        original_max_position_embeddings: int,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
        base: float = 10000.0,
        layout: Pairs = "half_split",
    ) -> RoPE:
        """Interpolate slow pairs, keep fast ones, and sharpen the softmax.

        Parameters
        ----------
        rotary_dim, factor, base, layout
            As for `RoPE.linear`.
        original_max_position_embeddings : int
            Context length of training, in tokens.
        beta_fast, beta_slow : float
            Pairs that turn more than `beta_fast` times within that length stay as they are, those
            of less than `beta_slow` turns are divided by `factor`, with a ramp between.
        attention_factor : float, optional
            `0.1 * log(factor) + 1` by default.
        mscale, mscale_all_dim : float, optional
            With both (DeepSeek), the default is the quotient of `0.1 * mscale * log(factor) + 1`
            and the same of `mscale_all_dim`.
        truncate : bool
            Let the ramp begin and end at whole pairs.

        Notes
        -----
        Source: Peng et al., "YaRN" (2023), sections 3.2 and 3.4.
        """
        inv_freq, attention_factor = scaling.yarn(
            rotary_dim, factor, original_max_position_embeddings, beta_fast, beta_slow,
            attention_factor, mscale, mscale_all_dim, truncate, base,
        )  # fmt: skip
        return cls(layout=layout, inv_freq=inv_freq, attention_factor=attention_factor)

    @classmethod
    def llama3(
        cls,
        rotary_dim: int,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_position_embeddings: int = 8192,
        *,
        base: float = 500000.0,
        layout: Pairs = "half_split",
    ) -> RoPE:
        """Llama 3.1: interpolate pairs of long wavelength, smoothly; defaults are those of 8B.

        Parameters
        ----------
        rotary_dim, factor, base, layout
            As for `RoPE.linear`.
        low_freq_factor, high_freq_factor : float
            Pairs that turn less than `low_freq_factor` times within the length of training are
            divided by `factor`, those of more than `high_freq_factor` turns stay as they are.
        original_max_position_embeddings : int
            Context length of training, in tokens.

        Notes
        -----
        Source: "The Llama 3 Herd of Models" (2024) and the published code.
        """
        limits = low_freq_factor, high_freq_factor, original_max_position_embeddings
        inv_freq = scaling.llama3(rotary_dim, factor, *limits, base)
        return cls(layout=layout, inv_freq=inv_freq)

    @classmethod
    @made_outside("RoPE.longrope", "reads the values of its arrays")
    def longrope(
        cls,
        rotary_dim: int,
        short_factor: ArrayLike,
        long_factor: ArrayLike,
        original_max_position_embeddings: int,
        seq_len: int,
        *,
        factor: float = 1.0,
        attention_factor: float | None = None,
        base: float = 10000.0,
        layout: Pairs = "half_split",
    ) -> RoPE:
        """A factor for each pair, found by search: one set up to the trained length, one beyond.

        Parameters
        ----------
        rotary_dim, base, layout
            As for `RoPE.linear`.
        short_factor, long_factor : array (rotary_dim / 2,)
            What frequencies are divided by.
        original_max_position_embeddings : int
            Context length of training, in tokens, m.
        seq_len : int
            Current length, in tokens; beyond m, `long_factor` holds.
        factor : float
            How many times as long the context may be as in training.
        attention_factor : float, optional
            `sqrt(1 + log(factor) / log(m))` by default, for short lengths as well.

        Notes
        -----
        Source: Ding et al., "LongRoPE" (2024), and Phi-3.
        """
        inv_freq, attention_factor = scaling.longrope(
            rotary_dim, short_factor, long_factor, original_max_position_embeddings, seq_len,
            factor, attention_factor, base,
        )  # fmt: skip
        return cls(layout=layout, inv_freq=inv_freq, attention_factor=attention_factor)

    @classmethod
    @made_outside("RoPE.from_hf_config", "reads a configuration")
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | Any,
        *,
        layer_type: str | None = None,
        seq_len: int | None = None,
        layout: Pairs | None = None,
    ) -> RoPE:
        """The rotary embedding of a Hugging Face model, from its configuration.

        Parameters
        ----------
        config : transformers configuration, or the dict of its `config.json`
        layer_type : str, optional
            Which layers, where they differ, as in Gemma 3: "full_attention", "sliding_attention".
        seq_len : int, optional
            Current length, for the types "dynamic" and "longrope"; by default one within the
            length of training.
        layout : "half_split" or "interleaved", optional
            By default what `rope_interleave` says; else what transformers does for this
            `model_type`, "half_split" if it is not known.

        Notes
        -----
        Types: default, linear, dynamic, yarn, longrope, llama3, proportional. The scale of scores
        is not read, which DeepSeek changes along with YaRN.

        Examples
        --------
        >>> import qkv
        >>> config = {"head_dim": 64, "rope_theta": 1e4,
        ...           "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
        >>> qkv.RoPE.from_hf_config(config).inv_freq[0]
        np.float64(0.25)
        """
        rotary = hf_config.read(config, layer_type, seq_len)
        pairs: Pairs = layout or ("interleaved" if rotary.interleaved else "half_split")
        return cls(layout=pairs, inv_freq=rotary.inv_freq, attention_factor=rotary.attention_factor)

    def frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position of each pair."""
        if self.inv_freq is not None:
            self._check_inv_freq((given := scaling.given_frequencies(self.inv_freq)).shape)
            return given
        if self.rotary_dim is None:
            return scaling.inverse_frequencies(head_dim, self.base, "head_dim")
        return scaling.inverse_frequencies(self.rotary_dim, self.base)

    def _check_inv_freq(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 1 or (self.rotary_dim is not None and self.rotary_dim != 2 * shape[0]):
            raise ArgumentError(
                f"inv_freq has shape {tuple(shape)}; rotary_dim={self.rotary_dim}.",
                action="Pass one frequency for each pair: (rotary_dim / 2,).",
            )

    def rotate(self, x: Any, positions: Any) -> Any:
        """Rotate rows by their positions, as attention with this variant does to query and key.

        For caches that hold rotated keys: attention without `RoPE` over rotated queries and keys
        is attention with it.

        Parameters
        ----------
        x : array (..., head_dim)
            NumPy array, torch tensor or JAX array of a floating type; gradients of torch and JAX
            go through. Entries from rotary_dim on are left alone.
        positions : int or integer array that broadcasts to x.shape[:-1]
            `np.arange(length)` for (..., length, head_dim); `positions[:, None, :]` if each row of
            a batch (batch, heads, length, head_dim) has its own; `positions[:, None]` for
            (..., length, heads, head_dim).

        Returns
        -------
        array
            Like `x`: library, dtype, device and shape.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            If positions or rotary_dim do not fit `x`, or have the wrong type.

        Notes
        -----
        On the CPU, angles are float64 and rows are rounded once: float32 rows get the bits that
        attention gives them. JAX without `jax_enable_x64` and other devices compute in float32,
        where positions that JAX traces have an error of `position * 2**-24` radians.
        """
        inv_freq: Any = self.inv_freq
        if not hasattr(inv_freq, "shape"):
            array_namespace(x)
            inv_freq = self.frequencies((0, *array_shape("x", x))[-1])
        self._check_inv_freq(inv_freq.shape)
        return rotate(x, positions, inv_freq, self.layout, self.attention_factor)

    def lower(self, builder: Builder) -> None:
        frequencies = self.frequencies(builder.shape.head_dim)
        builder.rotate(self.layout, frequencies, float(self.attention_factor))

    def naive_rows(self, dense: Dense) -> None:
        frequencies = self.frequencies(dense.query.shape[1])
        dense.query = self._rotated(dense.query, dense.q_pos, frequencies)
        dense.key = self._rotated(dense.key, dense.kv_pos, frequencies)

    def _rotated(self, rows: Array, positions: Array, frequencies: Array) -> Array:
        out, n = rows.astype(np.float64), len(frequencies)
        for row, position in enumerate(positions):
            for i, frequency in enumerate(frequencies):
                a, b = (i, i + n) if self.layout == "half_split" else (2 * i, 2 * i + 1)
                turn = self.attention_factor * np.exp(1j * float(position) * frequency)
                z = complex(rows[row, a], rows[row, b]) * turn
                out[row, a], out[row, b] = z.real, z.imag
        return out

    def naive(self, dense: Dense) -> None:
        """Do nothing: the rotation happens before the product."""

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[RoPE]:
        if shape.head_dim < 2:
            return (cls(rotary_dim=0),)
        even, half = shape.head_dim // 2 * 2, max(2, shape.head_dim // 4 * 2)
        plain = cls(rotary_dim=even), cls(layout="interleaved", rotary_dim=even)
        return (*plain, cls(base=500.0, rotary_dim=half), cls.yarn(half, 4.0, 32, base=500.0))
