"""Which command may be meant by a word that is not one."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.arguments.spelling import did_you_mean

__all__ = ["command_meant"]

_MEANT = {
    "explain": ("trace", "step", "steps", "show", "softmax", "attention"),
    "inspect": ("heads", "weights", "entropy", "map", "model"),
    "compare": ("mechanism", "mechanisms", "list"),
    "cost": ("count", "ledger", "flops", "operations", "memory"),
    "plan": ("backends", "schedule"),
    "lab": ("serve", "page", "tour", "heatmap", "tiles", "open", "export", "notebook", "widget"),
    "info": ("version", "doctor", "check", "machine", "env"),
}
"""Other words that people try for each command."""

_ELSEWHERE = {
    "exercises": "Exercises are a panel of qkv lab, and qkv.exercises in Python. ",
    "exercise": "Exercises are a panel of qkv lab, and qkv.exercises in Python. ",
    "bench": "qkv measures no speed; benchmarks/ of a checkout does. ",
    "benchmark": "qkv measures no speed; benchmarks/ of a checkout does. ",
}


def command_meant(word: str, commands: Sequence[str]) -> str:
    """A sentence and a space, or nothing if no command is like the word.

    Examples
    --------
    >>> command_meant("trace", ["explain", "lab"]), command_meant("explian", ["explain", "lab"])
    ('Did you mean explain? ', 'Did you mean explain? ')
    """
    plain = word.lower()
    if plain in _ELSEWHERE:
        return _ELSEWHERE[plain]
    for command, words in _MEANT.items():
        if plain in words and command in commands:
            return f"Did you mean {command}? "
    return did_you_mean(plain, commands)
