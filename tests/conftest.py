"""What all tests share."""

from hypothesis import settings

# No time limit per example, since machines are noisy; the same examples every time, so that red means a change.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
