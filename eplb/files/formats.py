"""All file formats, in the order in which files are compared with them; a new one is its own file and a row here."""

from __future__ import annotations

from evenroute.eplb.files import arrays, ascend, csv, evenroute, loglines, megatron, sglang, trtllm
from evenroute.eplb.files.format import Format

FORMATS: tuple[Format, ...] = (
    evenroute.PLACEMENT_SET,
    evenroute.STORE,
    evenroute.DUMP,
    arrays.NPZ,
    arrays.NPY,
    arrays.SAFETENSORS,
    csv.FORMAT,
    trtllm.LOAD_BALANCER,
    megatron.FORMAT,
    # of decoded objects (JSON, .pt)
    arrays.JSON_ARRAY,
    evenroute.PLACEMENT,
    trtllm.STATISTICS,
    ascend.FORMAT,
    sglang.FORMAT,
    # what has lines of a known form among any others
    loglines.FORMAT,
)
