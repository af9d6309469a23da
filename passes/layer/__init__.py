"""The layer pass: clusters ops into layers of even work that little crosses."""
