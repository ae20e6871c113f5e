"""What calls must know of the compiled code: the words of what is expected of a call."""

from __future__ import annotations

PLACES = ("not_finite", "kv_len", "q_shift")

CALL_WORDS = (
    "from_long_long", "as_long_long", "tuple_size", "tuple_item", "none", "block", "job",
    "job_argument", "job_keys", "q_len", "longest", "at_end", "results", "arrays", *PLACES,
)  # fmt: skip
"""What is expected of a call begins with these words: the addresses of `PyLong_FromLongLong`,
`PyLong_AsLongLong`, `PyTuple_Size`, `PyTuple_GetItem` and None; the argument block; a job that is
run at once, or 0, its second argument, and the most keys that it takes if their number is not
fixed. The number of keys is at most `longest`. The first of `q_len` queries stands at 0, or, if
`at_end` is 1, the last one at the last key. A call has so many `results` and `arrays` of variants.
`PLACES` say where in the block something is, in bytes; `kv_len` is 0 if the number of keys is
fixed, and `not_finite` if the job does not tell."""

OPERAND_WORDS = ("place", "dtype", "item", "ndim", "page", "page_rows")
"""The words after `CALL_WORDS`, for query, key and value, each result and each array: where the
address goes, the dtype object, the bytes of an element, and the number of axes. Of results nothing
else is expected. Arrays of pages of `page_rows` keys, which is else 0, have one more axis, the
first, with a stride of `page` bytes."""

AXIS_WORDS = ("size", "stride", "place", "keys")
"""The words after `OPERAND_WORDS`, for each axis: its size, -1 for the number of keys; its stride
in bytes, or, if any stride will do, where that goes, else 0. The axis of an array has an entry for
so many `keys`, unless this is 0; the word before that of its stride is then its size. If its size
is -1 too, no entry has fewer keys, as in a table of pages."""
