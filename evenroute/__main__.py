"""`python -m evenroute` is the command `evenroute`."""

from evenroute.tools.cli import main

main()
