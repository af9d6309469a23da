"""The plugin of golden plans, and the golden plans of autopar itself."""
