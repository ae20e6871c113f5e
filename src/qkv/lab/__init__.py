"""The lab: a page, a notebook widget and an offline file that show how attention is computed.

`qkv lab` at the command line serves the page; `qkv.lab.widget(...)` shows it in a notebook;
`qkv.lab.to_html(...)` writes it as one file that needs no network. All three show what a `Session`
answers, and a session answers with traces, ledgers and records of the rest of the library.

session         one session; it answers by the name of a question
small_methods   its answers about small examples; code_lines, walkthrough
heads           its layers and heads; weight_map draws their weights at any length, thumbnails
                a small picture of each head
what_if         its predictions of a model with heads changed
shipped         what it shows of heads where nothing else was opened; notable: which head first
sources         what it is opened with: a file, a record, arrays
examples        the small examples: shipped, from a trace, or typed in
messages        questions and answers as JSON and bytes; parameters checks the questions
server          the page of `qkv lab`; guard says who may ask, and how much; jobs runs what is long
document        the page as HTML: served, or one file with all answers inside
widget          the page in a notebook
static/         its script and style, made of lab/src/ by lab/build.mjs
"""

from qkv.lab.document import to_html
from qkv.lab.session import Session
from qkv.lab.sources import open_file
from qkv.lab.widget import widget

__all__ = ["Session", "open_file", "to_html", "widget"]
