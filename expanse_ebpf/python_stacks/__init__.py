"""Python stacks: which interpreter a process runs, how it is read, and what was sampled of it."""
