"""`python -m evenroute.tools` is `evenroute`."""

from evenroute.tools.cli import main

main()
