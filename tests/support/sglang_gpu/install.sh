#!/bin/sh
# On the machine without a network, once a part: sh install.sh PART-FOLDER TARGET [last]. The last call installs.
set -eu
mkdir -p "$2/pieces" && cp "$1"/* "$2/pieces/"
[ "${3:-}" = last ] || exit 0
cd "$2/pieces"
python3 - <<'PY'
import hashlib, json, pathlib
here = pathlib.Path(".")
for name, digest in json.loads((here / "sums.json").read_text()).items():
    assert hashlib.sha256((here / name).read_bytes()).hexdigest() == digest, name
for first in here.glob("*.piece00"):
    whole = first.name.removesuffix(".piece00")
    (here / whole).write_bytes(b"".join(part.read_bytes() for part in sorted(here.glob(whole + ".piece*"))))
PY
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$2/site" ./*.whl
