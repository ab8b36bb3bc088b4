"""Read docstrings as the plain text they are: |x| is an absolute value and s_+ a symbol, not reStructuredText."""

import re

# Literal text in double or single backticks stays as it is.
LITERAL = re.compile(r"(``.*?``|`[^`]*`)")


def plain(line: str) -> str:
    """Escape bars and trailing underscores outside of backticks."""
    pieces = LITERAL.split(line)
    pieces[::2] = [re.sub(r"\||(?<=\w)_(?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
    return "".join(pieces)


def process(app, what, name, obj, options, lines) -> None:
    """Handler of autodoc's event: changes the lines in place, as autodoc asks."""
    lines[:] = map(plain, lines)


def setup(app) -> dict:
    """Connect to autodoc."""
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
