"""Pictures of data: tables for a terminal, SVG drawings and the HTML page."""
