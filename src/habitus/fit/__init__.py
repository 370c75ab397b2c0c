"""Laws with uncertainty."""
