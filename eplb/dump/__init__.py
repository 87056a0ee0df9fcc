"""Dumps: the files of recordings, one file of checksummed frames."""
