"""The `evenroute` command."""
