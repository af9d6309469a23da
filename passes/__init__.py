"""The wing that decides: five passes from a graph to a program, which know no device."""
