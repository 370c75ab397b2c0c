"""How long work reports to its caller: two kinds of functions that the caller passes, and prints as it likes."""

from collections.abc import Callable

# Called with the name of a phase and the share of it that is done; an empty name continues the last phase.
Progress = Callable[[str, float], None]

# Called with one sentence that a person should read.
Note = Callable[[str], None]
