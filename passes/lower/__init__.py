"""The lower pass: writes the program of every submesh and proves that it cannot deadlock."""
