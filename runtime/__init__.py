"""Acts: binds plans to devices and runs them."""
