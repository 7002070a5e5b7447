"""What the agent does about GPUs: staging, the driver's checkpoint, facts and refusals.

Nothing here is imported by a rank, and nothing here needs a driver to be imported.
"""
