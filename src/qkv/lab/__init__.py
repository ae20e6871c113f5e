"""The lab: a page, a notebook widget and an offline file that show how attention is computed.

`qkv lab` at the command line serves the page; `qkv.lab.widget(...)` shows it in a notebook;
`qkv.lab.to_html(...)` writes it as one file that needs no network. All three show what a `Session`
answers, and a session answers with traces, ledgers and records of the rest of the library.

session         one session; it answers by the name of a question
sources         what it is opened with, and what it shows of layers, heads and models
small_examples  examples of a few tokens, and its answers about them
messages        questions and answers as JSON and bytes
parameters      checks of what a question holds
serving         the page of `qkv lab`
document        the page as HTML: served, or one file with all answers inside
widget          the page in a notebook
static/         its script and style, made of lab/src/ by lab/build.mjs
"""

from qkv.lab.document import to_html
from qkv.lab.session import Session
from qkv.lab.sources.source import open_file
from qkv.lab.widget import widget

__all__ = ["Session", "open_file", "to_html", "widget"]
