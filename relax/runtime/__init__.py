"""Where roles meet: `local` runs them in one process."""
