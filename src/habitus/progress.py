"""How long work tells its caller where it is. Both are plain functions; printing is the caller's business."""

from collections.abc import Callable

# Called with the name of a phase and the share of it that is done; an empty name continues the last phase.
Progress = Callable[[str, float], None]

# Called with one sentence that a person should read.
Note = Callable[[str], None]
