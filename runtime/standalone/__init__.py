"""The code that an exported plan runs on: copied into the export, with no autopar in it."""
