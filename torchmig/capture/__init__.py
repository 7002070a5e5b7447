"""State of a job as streams of a repository, and back: process trees, devices, files."""
