"""Libraries read these when they are first imported, so they are set before any test imports torch or a kernel."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests run beside each other: OpenMP's threads would wait for cores that the neighbours have.
os.environ.setdefault("OMP_NUM_THREADS", "1")
