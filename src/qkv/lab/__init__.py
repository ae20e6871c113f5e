"""The lab: a page, a notebook widget and an offline file that show how attention is computed.

`qkv lab` at the command line serves the page; `qkv.lab.widget(...)` shows it in a notebook;
`qkv.lab.to_html(...)` writes it as one file that needs no network. All three show what a `Session`
answers, and a session answers with traces, ledgers and records of the rest of the library.
"""

from qkv.lab.document import to_html
from qkv.lab.session import Session
from qkv.lab.sources import open_file
from qkv.lab.widget import widget

__all__ = ["Session", "open_file", "to_html", "widget"]
