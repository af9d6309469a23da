"""The report of a plan as one HTML page that needs no network."""
