"""What one request may ask for, and how long it may take."""

from pydantic import Field

from habitus.typed import Typed


class ServerLimits(Typed):
    """Bounds of the service; a request beyond one is refused with the number that holds."""

    max_body_bytes: int = Field(1 << 20, ge=1024, description="Of a request's body.")
    max_history: int = Field(2_000, ge=1, description="Events of one history; the model reads the newest ones.")
    max_k: int = Field(1_000, ge=1, description="Recommendations in one answer.")
    max_rows: int = Field(256, ge=1, description="Histories or items of one embed request.")
    timeout_s: float = Field(10.0, gt=0, description="From a request's headers to its answer.")
    read_timeout_s: float = Field(10.0, gt=0, description="For headers, and for a body, to arrive.")
    max_batch: int = Field(64, ge=1, description="Requests computed together.")
    max_wait_ms: float = Field(2.0, ge=0, description="How long a request may wait for company.")
    max_queue: int = Field(512, ge=1, description="Requests that wait; beyond it 503.")
    max_connections: int = Field(1_000, ge=1, description="Open connections; beyond it 503.")
    shutdown_s: float = Field(30.0, gt=0, description="For requests in flight to finish after SIGTERM.")
