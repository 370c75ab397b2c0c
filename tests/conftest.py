"""What all tests share."""

from hypothesis import settings

# No time limit per example, since machines are noisy; and the same examples every time, so that a red run means a change.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
