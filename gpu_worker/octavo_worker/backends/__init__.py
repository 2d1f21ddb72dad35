"""Backends: the operations that differ between devices. The choice is made once, at start.

Entry point: `choose_backend`. A CPU worker never imports triton.
"""

import torch

from octavo.errors import ConfigurationError
from octavo_worker.backends.base import Backend

__all__ = ["Backend", "choose_backend"]


def choose_backend(name: str, card: int | None = None) -> tuple[Backend, torch.device]:
    """The backend and device for the setting `name` ("auto", "cuda" or "cpu").

    "auto" takes the card if torch sees one; `card`: its number, None = torch's current one.
    Raises ConfigurationError for "cuda" without one.
    """
    has_card = torch.cuda.is_available()
    if name == "cuda" and not has_card:
        raise ConfigurationError(
            "OCTAVO_BACKEND=cuda: torch finds no CUDA device; use cpu or install a CUDA build",
            param="backend",
        )
    if has_card and name in ("auto", "cuda"):
        from octavo_worker.backends.cuda import CudaBackend

        if card is not None:
            torch.cuda.set_device(card)
        return CudaBackend(), torch.device("cuda", torch.cuda.current_device())
    from octavo_worker.backends.cpu import CpuBackend

    return CpuBackend(), torch.device("cpu")
