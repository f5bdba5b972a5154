"""For Terraform's data source `external`: JSON with strings in, JSON with strings out.

It takes `file`, the desired groups, and answers what would change. Needs `redis-stream-coord` in the PATH.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Answer one query on standard output."""
    query = json.load(sys.stdin)
    done = subprocess.run(
        ["redis-stream-coord", "plan", query["file"], "--json"], capture_output=True, text=True, check=False
    )
    document = json.loads(done.stdout or "{}")
    if not document.get("ok"):
        sys.exit(done.stderr or document.get("error", {}).get("message", f"exit code {done.returncode}"))
    changes = [change["text"] for change in document["data"]["changes"]]
    json.dump(
        {
            "changes": str(len(changes)),
            "summary": "; ".join(changes) or "nothing has drifted",
            # Grows with the file, and with drift: either is a reason to apply again.
            "trigger": hashlib.sha256(Path(query["file"]).read_bytes() + "".join(changes).encode()).hexdigest(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
