"""Failures that a user can fix."""


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
    """A recipe, schema or option that cannot be used."""


class DataError(HabitusError):
    """Input tables or a dataset folder that cannot be used."""


class ModelError(HabitusError):
    """Tensors, weights or a bundle that do not fit together."""


class FitError(HabitusError):
    """Records or arrays that no law can be fitted to at all."""


class RunError(HabitusError):
    """A run, store or worker that cannot continue."""


class OutOfMemory(RunError):
    """A run that does not fit the device's memory; smaller micro-batches or fewer processes on it may help."""


class Interrupted(RunError):
    """A run that was told to stop and has saved a checkpoint."""
