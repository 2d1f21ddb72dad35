"""Octavo's shared contract: messages, block hashes, random numbers, settings, errors, client.

Must not know any service. Entry points: `octavo.client` (Python client) and `octavo.cli`.
"""

__version__ = "0.1.0"
# Neighbours whose versions differ by at most one work together (rolling upgrades).
WIRE_VERSION = 1
