"""Writes the page of primitives: `python -m docs.reference.make` writes it beside this file.

A test makes the page again and compares, so run this where a rule is added or its words change.
"""

from pathlib import Path

from autopar.rules import primitive_fates

PAGE = Path(__file__).parent / "primitives.md"

_HEAD = """\
# Primitives

What becomes of every primitive of JAX 0.10 to 0.12 in a step, by name. `docs/reference/make.py`
writes this page from the table of rules.

A primitive of another package is not listed: one that compiles as a JAX function is planned as
that function, as those of equinox and lineax are. Any other runs whole on every device, with a
warning that names your line, until it is [given a rule](../how-to/add-a-rule.md). A kernel of
Pallas is cut along each dim of its grid, such as one that `vmap` added, whose blocks it computes
each on its own: block i of every tensor that has the dim, all results among them, and no
`program_id` or `num_programs` of it in the kernel.

| primitive | what becomes of it |
|---|---|
"""


def page() -> str:
    """The page's text."""
    return _HEAD + "".join(f"| `{name}` | {what} |\n" for name, what in primitive_fates())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
