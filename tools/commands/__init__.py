"""One file for each command of `evenroute`."""
