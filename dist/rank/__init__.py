"""The rank's side: what an engine calls, and the threads behind it.

`agent` is the engine's object; `start` begins a job, `closing` ends it. On the forward thread: `counts` takes counts
off the device, `switch` carries out what votes decide, `notes` keeps what was done, `clock` measures steps, `step` says
what one is routed with. `thread` owns the socket, `votes` the collective.
"""
