"""`octavo fetch [MODEL]`: get a model now, so that services find it on disk when they start.

For image builds, init containers and shared volumes: one process talks to the hub or converts
the demo model, all others may read it offline. Must not know: services. Entry point: `main`.
"""

import argparse

from octavo.hub import DEMO_MODEL, resolve_model


def main(argv: list[str] | None = None) -> int:
    """Print the folder in which MODEL lies. Raises ConfigurationError for what can't be got."""
    parser = argparse.ArgumentParser(
        prog="octavo fetch",
        description="Fetch a model into the cache (OCTAVO_CACHE, HF_HOME) and print its folder.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help="Hugging Face id, folder, or 'demo' [demo]",
    )
    parser.add_argument("--revision", default=None, help="revision of the Hugging Face id")
    parser.add_argument(
        "--no-weights", action="store_true", help="only what a router needs: configuration, text"
    )
    arguments = parser.parse_args(argv)
    weights = not arguments.no_weights
    print(resolve_model(arguments.model, arguments.revision or None, weights=weights))
    return 0
