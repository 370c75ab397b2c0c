"""Failures that a user can mend."""


class HabitusError(Exception):
    """One clear failure: what was given, what was expected, what to do next."""

    def __init__(self, problem: str, *, expected: str = "", next_step: str = "") -> None:
        self.problem = problem
        self.expected = expected
        self.next_step = next_step
        parts = [problem]
        if expected:
            parts.append(f"Expected: {expected}")
        if next_step:
            parts.append(f"Next step: {next_step}")
        super().__init__("\n".join(parts))


class ConfigError(HabitusError):
    """A recipe, schema or option that cannot be used as given."""


class DataError(HabitusError):
    """Input tables or a dataset folder that cannot be used as given."""


class ModelError(HabitusError):
    """Tensors, weights or a bundle that do not fit together."""


class FitError(HabitusError):
    """Records or arrays that no law can be fitted to at all."""


class RunError(HabitusError):
    """A run, store or worker that cannot go on."""


class OutOfMemory(RunError):
    """A run that the device's memory does not hold; smaller micro-batches or fewer neighbours may help."""


class Interrupted(RunError):
    """A run that was asked to stop and has saved where it is."""
