"""Dumps: the files of recordings, one file of checksummed frames.

format    the recorder dump: one file of checksummed frames, written in a stream and read in a stream
partial   dumps in the making: `.NAME.PID-HEX.partial` beside the target NAME, until they are whole an
reader    reads recorder dumps frame by frame
writer    writes recorder dumps: streamed to a file beside the target, renamed only when whole
"""
