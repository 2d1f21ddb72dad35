"""What the router's two doors share: wired once by the entry point.

Must not know: HTTP, protos. Entry point: `Service`.
"""

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from octavo.errors import ModelNotFoundError, UnavailableError
from octavo.metrics import RouterMetrics
from octavo.settings import RouterSettings
from octavo.telemetry import Tracer
from octavo_router.auth import KeyRing
from octavo_router.fields import show
from octavo_router.generation_defaults import GenerationDefaults
from octavo_router.live_feed import LiveFeed
from octavo_router.pipeline import Pipeline
from octavo_router.quotas import Quotas
from octavo_router.requests import RequestRules
from octavo_router.sessions import Sessions

MAX_MODEL_NAME_CHARS = 256


@dataclass(slots=True)
class Service:
    """The router as its doors see it. `model_names`: the first is the one in answers' `model`
    when a request names none."""

    settings: RouterSettings
    model_names: tuple[str, ...]
    defaults: GenerationDefaults
    pipeline: Pipeline
    sessions: Sessions
    keys: KeyRing
    metrics: RouterMetrics
    registry: CollectorRegistry
    feed: LiveFeed
    quotas: Quotas | None = None
    tracer: Tracer | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self.sessions.is_ready

    @property
    def vocab_size(self) -> int:
        """Ids are below it: the model's, or the tokenizer's until a scheduler said it."""
        model = self.sessions.model
        return self.pipeline.tokenizer.vocab_size if model is None else model.vocab_size

    def check_open(self) -> None:
        """Raise UnavailableError while draining: what runs finishes, nothing new begins."""
        if self.is_draining:
            raise UnavailableError("the router is shutting down; try again", retry_after_ms=1000)

    def served_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ModelNotFoundError."""
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            raise ModelNotFoundError(
                f"model {show(asked)} isn't served here; served: {', '.join(self.model_names)}",
                param="model",
            )
        return asked

    @property
    def rules(self) -> RequestRules:
        """What requests are validated by."""
        return RequestRules(
            self.defaults, self.vocab_size, self.settings.trust_request_chat_template
        )

    @property
    def timeout_s(self) -> float | None:
        """The default deadline of a request."""
        return self.settings.request_timeout_s or None
