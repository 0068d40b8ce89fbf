"""Rules: what is looked for in the newest figures of every job, and which of it opens a window."""
