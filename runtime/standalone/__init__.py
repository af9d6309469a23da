"""What a plan exported as Python runs on: code with no autopar in it, copied into the export."""
