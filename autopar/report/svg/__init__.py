"""Drawings as SVG text, each a pure function of what it shows."""
