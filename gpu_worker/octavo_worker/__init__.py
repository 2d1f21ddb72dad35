"""The worker: weights, paged KV cache, steps, sampling; and who leads it.

Must not know requests, clients, other workers, policy. Read first: `runner` (a step), then
`row_book`, `engine` (its thread), `leadership`, `server` (the edge). `models` holds the
decoders, `backends` what differs between devices.
"""

import os

# OpenMP reads this once, when torch is first imported. Its threads spin while they wait, which
# makes a step several times slower on cores that others use too (a decode step of 135M
# parameters, 2 threads on 2 busy cores: 188 ms of CPU time against 43 asleep).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
