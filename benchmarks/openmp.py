"""Imported before torch is, by scripts that measure steps: threads of torch that wait sleep, as those of
`tierstream train` do. OpenMP reads this once, when torch loads it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
