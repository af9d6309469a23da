"""Programs that once failed, as small as they could be made."""

from __future__ import annotations

from tests.fuzz.configs import Config

FOUND: dict[str, tuple[str, Config]] = {}
