"""The colours of the terminal, by what they say."""

ACCENT, GOOD, BAD, QUIET = "cyan", "green", "red", "bright_black"
