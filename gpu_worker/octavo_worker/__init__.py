"""The worker: weights, paged KV cache, steps, sampling; and who leads it.

Must not know requests, clients, other workers, policy. Read first: `runner` (a step), then
`row_book`, `engine` (its thread), `leadership`, `server` (the edge). `models` holds the
decoders, `backends` what differs between devices.
"""
