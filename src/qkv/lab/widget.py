"""The lab in a notebook: one anywidget for Jupyter, marimo and VS Code."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from qkv.arguments.declarations import is_integer
from qkv.errors import QkvError, UnsupportedError
from qkv.extras import install_command
from qkv.lab.document import asset
from qkv.lab.messages import Answer, failure, read_request
from qkv.lab.session import Session
from qkv.lab.sources.source import source_of

__all__ = ["reply", "widget"]

_LOG = logging.getLogger("qkv.lab")


def widget(shown: Any = None, tokens: Sequence[str] | None = None) -> Any:
    """The lab as a notebook widget.

    Parameters
    ----------
    shown : Record, ModelRecord, Trace or Source, optional
        What to show beside the examples that come with qkv; `qkv.lab.open_file(path)` opens a file.
    tokens : sequence of str, optional
        Names of the keys of a record.

    Returns
    -------
    anywidget.AnyWidget
        With the traits `data` and `view`; a notebook shows it where it is the last value of a cell.

    Raises
    ------
    UnsupportedError
        anywidget is not installed.

    Examples
    --------
    >>> import qkv.lab
    >>> qkv.lab.widget(qkv.inspect(q, k, v))  # doctest: +SKIP
    """
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise UnsupportedError(
            f"a widget needs anywidget, and {error.name} is not installed.",
            action=install_command("lab") + ".",
        ) from error
    session = Session(None if shown is None else source_of(shown, tokens))

    class Lab(anywidget.AnyWidget):
        """The lab; its messages are questions to the session."""

        _esm = asset("lab.js")
        _css = asset("lab.css")
        data = traitlets.Dict().tag(sync=True)
        view = traitlets.Dict().tag(sync=True)

    made = Lab(data=session.data("widget"))

    def answer(sender: Any, content: Any, buffers: Any) -> None:
        message, arrays = reply(session, content)
        made.send(message, arrays)

    made.on_msg(answer)
    return made


def reply(session: Session, content: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The answer to a message, and the bytes of its arrays; errors are answers too."""
    number = content.get("id", 0) if isinstance(content, dict) else 0
    try:
        asked = read_request(content)
        answer: Answer = session.answer(asked.method, asked.params, asked.shown)
    except Exception as error:
        if not isinstance(error, QkvError):
            _LOG.error("a request failed", exc_info=error)
        return failure(number if is_integer(number) else 0, error), []
    little = (a.astype(a.dtype.newbyteorder("<")) for a in answer.arrays)
    return answer.message(asked.id), [a.tobytes() for a in little]
