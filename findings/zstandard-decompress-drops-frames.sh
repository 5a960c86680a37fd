#!/usr/bin/env bash
# Guess: ZstdDecompressor().decompress(data) gives all of the data, as gzip.decompress does with several members and
#   `zstd -d` with several frames. Shards made by `cat a.jsonl.zst b.jsonl.zst` or by a writer that ends a frame at
#   intervals are valid (RFC 8878, 3.1: frames may be concatenated).
# Fact: it returns the first frame and no error. The rest of the corpus is missing. In the same package open() and
#   stream_reader() read all frames, so a program is right or wrong by the call that it reads the same file with.
# Source: python-zstandard 0.25.0, backend_cffi.py:ZstdDecompressor.decompress (allow_extra_data=True, read_across_frames
#   not implemented).
# Remedy: stream_reader(...).read(), or decompress(..., allow_extra_data=False), which raises.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q zstandard==0.25.0 pyarrow==25.0.1
cat > "$work/show.py" <<'PY'
import gzip
import io

import pyarrow
import zstandard

documents = [b'{"n": 1}\n', b'{"n": 2}\n', b'{"n": 3}\n']
shard = b"".join(map(zstandard.compress, documents))
reader = zstandard.ZstdDecompressor()
read = {
    "gzip.decompress": gzip.decompress(b"".join(map(gzip.compress, documents))),
    "zstandard decompress": reader.decompress(shard),
    "zstandard stream_reader": reader.stream_reader(io.BytesIO(shard)).read(),
    "zstandard open": zstandard.open(io.BytesIO(shard)).read(),
    "pyarrow": pyarrow.CompressedInputStream(io.BytesIO(shard), "zstd").read(),
}
for name, text in read.items():
    print(name, text.count(b"\n"), "of", len(documents))
PY
"$work/venv/bin/python" "$work/show.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
gzip.decompress 3 of 3
zstandard decompress 1 of 3
zstandard stream_reader 3 of 3
zstandard open 3 of 3
pyarrow 3 of 3
SEEN
