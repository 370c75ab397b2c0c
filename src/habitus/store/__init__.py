"""What rooms hand each other on disk, typed once."""
