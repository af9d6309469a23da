"""An option that writes what commands print now into the pages of the documentation."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--docs-update", action="store_true", help="Write the figures of console blocks anew."
    )
