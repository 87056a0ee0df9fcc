"""Dumps: the files of recordings, one file of checksummed frames.

format    frames and their content
writer    streamed beside the target, renamed when whole
reader    frame by frame; unfinished dumps too
partial   names and locks of unfinished dumps
"""
