"""The models that plans are judged by, at true widths and with some of their layers."""
