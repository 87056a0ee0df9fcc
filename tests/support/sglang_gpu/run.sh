#!/bin/sh
# sh run.sh REPO TARGET OUT: all three of run.py at once, then what they found. TARGET is install.sh's.
repo=$1 target=$2 out=$3
export PYTHONPATH=$target/site:$repo:$target/plugin:$repo/tests/support/sglang_env:$repo/tests
export EVENROUTE_SGLANG_STUBS=IPython,flashinfer SGLANG_IS_FLASHINFER_AVAILABLE=false PYTHONWARNINGS=ignore
export PYTHONDONTWRITEBYTECODE=1
mkdir -p "$target/plugin/evenroute-0.dist-info"
printf 'Metadata-Version: 2.1\nName: evenroute\nVersion: 0\n' >"$target/plugin/evenroute-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\nevenroute = evenroute.dist.engines.sglang.seams:register\n' \
    >"$target/plugin/evenroute-0.dist-info/entry_points.txt"
cd "$target" || exit 1
python3 -c 'import torch
from pathlib import Path
from support.sglang_model import make_model
make_model(Path("model"), 0, torch.bfloat16)'
run() { timeout "$LIMIT" python3 "$repo/tests/support/sglang_gpu/run.py" "$1" "$2" model >"$out/$1.log" 2>&1; echo "$1: status $?"; }
LIMIT=${LIMIT:-150}
mkdir -p ref even
run reference "$target/ref/answers.json" &
run even "$target/even/answers.json" &
run launches none &
wait
python3 -c 'import json
a, b = json.load(open("ref/answers.json")), json.load(open("even/answers.json"))
print("rounds of evenroute equal to the plain engine:", [one == a[0] for one in b], "the plain one to itself:", a[0] == a[1])'
grep -h "evenroute\|engine up\|round\|windows\|kernels a layer\|apture" "$out"/*.log | cut -c1-260
