"""The worker: weights, paged KV cache, steps, sampling; and who leads it.

Must not know requests, clients, other workers, policy. Read first: `runner` (a step), then
`row_book`, `engine` (its thread), `leadership`, `server` (the edge). `models` holds the
decoders, `backends` what differs between devices.
"""

import os

# OpenMP reads this once, when torch is first imported. Its threads spin while they wait, which on
# cores that others use too makes a step 5 to 10 times slower (2 cores, 135M parameters, decode:
# 236 ms against 70); asleep they cost a core alone next to nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
