"""Dumps: the files of recordings, one file of checksummed frames.

format    frames with checksums
partial   dumps that are still being written
reader    frame by frame
writer    streamed beside the target, renamed when whole
"""
